"""A replica's process in a simulation: the real session, work that is made up, and whether it lives."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Final

from cosmos_core.config.schema import ControlConfig
from cosmos_core.errors import ReplicaError, TransportError
from cosmos_core.replica.activity import Pulse
from cosmos_core.replica.session import Session
from cosmos_core.transport.messages import DOWN, UP, Acknowledged, Directive, Down, Hello, Welcome
from cosmos_core.transport.outbox import Outbox
from cosmos_core.transport.reports import (
    REPORT,
    GenerationFailed,
    GenerationFormed,
    GroupFailed,
    GroupFinished,
    Report,
    StepDone,
    StepFailed,
)
from tests.simulation.replicas import FakePolicy, FakeRollout
from tests.simulation.simulator.faults import Faults
from tests.simulation.simulator.network import Agenda
from tests.simulation.simulator.trace import Trace
from tests.simulation.simulator.witness import Violation, Witness

_FENCED: Final = (GroupFinished, GroupFailed, StepFailed, GenerationFailed)
"""What can be said again without being wrong: it carries what it belongs to, and nothing that a replica holds now."""
_HOLDING: Final = (StepDone, GenerationFormed)
"""What can be said again for as long as the replica still holds the weights that it tells of."""

_LAZINESS: Final = {"policy": 0.6, "rollout": 0.3}
_SLOW_LAZINESS: Final = 0.95
_PATIENCE_S: Final = 150.0


class Replica:
    """One process; whoever has its name after it is another one.

    Args:
        hello: How it introduces itself.
        fake: What it works with.
        agenda: Simulated time.
        rng: When it works, and what it gets wrong.
        faults: How often; the owner changes it when faults cease.
        control: Intervals.
        witness: Sees what it reports.
        trace: Where what happened is kept.
        say: Carries a message to the controller.
        holders: Names of the processes of the other role that have the GPUs: all, or those that are not in the run.
        building_s: How long it has them before it joins; None where pools share none.

    Attributes:
        faults: As given.
        fake: As given.
        has_left: Whether it ended as it was told to.
        is_gone: Whether nobody starts another process in its place.
        is_hung: Whether it beats and does nothing else.
        is_up: Whether it lives.
        is_building: Whether it has the GPUs, and has not joined.
        frozen_until: When it stands still no longer.
        back_at: When another process takes its place; None while it lives.
    """

    def __init__(
        self,
        hello: Hello,
        fake: FakePolicy | FakeRollout,
        *,
        agenda: Agenda,
        rng: random.Random,
        faults: Faults,
        control: ControlConfig,
        witness: Witness,
        trace: Trace,
        say: Callable[[bytes, bytes], None],
        holders: Callable[[bool], list[str]],
        building_s: float | None,
    ) -> None:
        self.faults = faults
        self.fake: Final = fake
        self.has_left = False
        self.is_gone = False
        self.is_up = True
        self.frozen_until = 0.0
        self.back_at: float | None = None
        self._session: Final = Session(
            hello, heartbeat_s=control.heartbeat_s, gauges=dict, outbox=Outbox(), take_pulse=self._pulse
        )
        self._agenda: Final = agenda
        self._rng: Final = rng
        self._trace: Final = trace
        self._say: Final = say
        self._made: Final = witness.made.setdefault(hello.incarnation, [])
        self._identity: Final = f"{hello.name}|{hello.incarnation}".encode()
        self._inbox: list[bytes] = []
        self.is_hung = False
        self._stuck_in = 0
        """The generation in which it waits for the others for ever; 0: none."""
        self._is_threatened = rng.random() < faults.wreck
        self._laziness: Final = _SLOW_LAZINESS if rng.random() < faults.slow else _LAZINESS[hello.role]
        self._term = 0
        self._past: Final[list[Report]] = []
        self._holders: Final = holders
        self._building_s = building_s
        self._built_at = 0.0
        self._waiting_since = agenda.now
        self.is_building = False
        agenda.after(rng.random() * 0.1, self._turn)

    @property
    def name(self) -> str:
        """Its name."""
        return self._session.hello.name

    @property
    def incarnation(self) -> str:
        """Its process."""
        return self._session.hello.incarnation

    @property
    def hello(self) -> tuple[bytes, bytes]:
        """Its identity, and how it introduces itself."""
        return self._identity, UP.encode(self._session.hello)

    @property
    def acknowledged(self) -> int:
        """Number of the newest report that it knows to be durable."""
        return self._session.outbox.acknowledged

    @property
    def refusal(self) -> str:
        """Why the controller does not want it."""
        return self._session.refusal

    def is_at_stake(self, *, is_leaving: bool) -> bool:
        """Whether it was just told to take over the newest weights, or shall leave with them; True once at most."""
        directive = self._session.directive
        if not self._is_threatened or directive is None or directive.policy is None:
            return False
        order = directive.policy.generation
        takes_over = order is not None and isinstance(self.fake, FakePolicy) and self.fake.lacks(order)
        self._is_threatened = not (takes_over or is_leaving)
        return not self._is_threatened

    @property
    def is_frozen(self) -> bool:
        """Whether it stands still."""
        return self.frozen_until > self._agenda.now

    def end(self, why: str) -> None:
        """Its process ends; what it held is gone."""
        if self.is_up:
            self._trace.note(self._agenda.now, self.name, why)
            self.is_up = False
            self.fake.end()

    def freeze(self, seconds: float) -> None:
        """It stands still for a while; what it is told meanwhile waits for it."""
        self._trace.note(self._agenda.now, self.name, f"stands still for {seconds:.1f} s")
        self.frozen_until = self._agenda.now + seconds

    def hang(self) -> None:
        """It does nothing any more but beat."""
        self._trace.note(self._agenda.now, self.name, "hangs")
        self.is_hung = True

    def get_stuck(self) -> None:
        """It waits in a collective of its gradient group, which never ends, until another group is formed."""
        if number := self._generation():
            self._trace.note(self._agenda.now, self.name, f"is stuck in generation {number}")
            self._stuck_in = number

    @property
    def is_stuck(self) -> bool:
        """Whether it waits for others that never come."""
        return self._stuck_in > 0 and self._stuck_in == self._generation()

    def _generation(self) -> int:
        directive = self._session.directive
        order = directive.policy.generation if directive is not None and directive.policy is not None else None
        return 0 if order is None else order.generation

    def _pulse(self) -> Pulse:
        if self.is_stuck and not self.is_hung:
            return Pulse(progress=0, doing="waiting for the others of its group", waits=True)
        return Pulse(progress=0, doing="something that never ends" if self.is_hung else "", waits=False)

    def hear(self, data: bytes) -> None:
        """A message arrives."""
        if self.is_up:
            self._inbox.append(data)

    def _turn(self) -> None:
        if not self.is_up:
            return
        if self.is_frozen:
            self._agenda.after(self.frozen_until - self._agenda.now, self._turn)
            return
        if self._building_s is not None and not self._is_built(self._building_s):
            self._agenda.after(0.05 + self._rng.random() * 0.05, self._turn)
            return
        inbox, self._inbox = self._inbox, []
        for data in inbox:
            self._receive(DOWN.decode(data))
        if not self.refusal:
            if not self.is_hung and not self.is_stuck:
                self._work()
            self._speak()
        if self.is_up:
            self._agenda.after(0.02 + self._rng.random() * 0.1, self._turn)

    def _is_built(self, building_s: float) -> bool:
        """Whether it has had the GPUs for long enough to be made, and sleeps; it waits for them as long as it takes."""
        now = self._agenda.now
        if not self.is_building:
            if awake := self._holders(False):
                if now - self._waiting_since > _PATIENCE_S:
                    raise Violation("turns", f"{self.incarnation} waits for {awake} since {self._waiting_since:.1f} s")
                return False
            self.is_building, self._built_at = True, now + building_s
        if now < self._built_at:
            return False
        self._building_s, self.is_building = None, False
        return True

    def _receive(self, message: Down) -> None:
        now, session = self._agenda.now, self._session
        before, acknowledged = session.directive, session.outbox.acknowledged
        self._trace.note(now, self.name, message)
        try:
            session.receive(message, now)
        except (ReplicaError, TransportError) as error:
            raise Violation("durable", f"{self.incarnation} cannot take {message}: {error}") from error
        if not isinstance(message, Acknowledged | Welcome | Directive):
            return
        if message.term < self._term and (session.directive, session.outbox.acknowledged) != (before, acknowledged):
            raise Violation("once", f"{self.incarnation} took {message} in, and had heard of term {self._term}")
        self._term = max(self._term, message.term)
        after = session.directive
        if before and (after is None or (after.term, after.revision) < (before.term, before.revision)):
            raise Violation("once", f"{self.incarnation} went back from directive {before} to {after}")

    def _work(self) -> None:
        directive = self._session.directive
        if directive is None or self._rng.random() < self._laziness:
            return
        wanted = directive.policy or directive.rollout
        # Those in the run are told to sleep before; of the others the lock takes care.
        if wanted is not None and not wanted.sleep and not self.fake.is_awake and self._holders(True):
            return
        if isinstance(self.fake, FakePolicy):
            assert directive.policy is not None
            reports = self.fake.follow(directive.policy)
            self._session.set_step(self.fake.step)
            is_over = directive.policy.stop
        else:
            assert directive.rollout is not None
            reports = self.fake.follow(directive.rollout)
            is_over = directive.rollout.stop
        for report in reports:
            self._report(report)
        if self._past and self._rng.random() < self.faults.stutter:
            self._stutter()
        if (is_over or self.fake.has_left) and not len(self._session.outbox):
            self.has_left = True
            self.end("leaves: the run is over" if is_over else "leaves, as it was asked to")

    def _report(self, report: Report) -> None:
        self._say_again(report)
        if isinstance(report, _FENCED + _HOLDING):
            self._past.append(report)

    def _stutter(self) -> None:
        said = [each for each in self._past if isinstance(each, _FENCED) or self._still_holds(each)]
        if said:
            self._say_again(self._rng.choice(said))

    def _still_holds(self, report: Report) -> bool:
        return isinstance(self.fake, FakePolicy) and self.fake.still_holds(report)

    def _say_again(self, report: Report) -> None:
        data = REPORT.encode(report)
        self._made.append(data)
        self._session.outbox.append(data)

    def _speak(self) -> None:
        now = self._agenda.now
        while self.is_up and (message := self._session.next_message(now)) is not None:
            self._trace.note(now, self.name, message)
            self._say(self._identity, UP.encode(message))
            self._session.sent(message, now)
