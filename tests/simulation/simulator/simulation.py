"""A whole run in one process, on simulated time: replicas, controller, disk, network, people, and what goes wrong."""

from __future__ import annotations

import functools
import random
from typing import Final

import attrs

from cosmos_core.control.machine.events import EVENTS, Reported, RunOpened
from cosmos_core.control.machine.state import State
from cosmos_core.transport.messages import Drain, Lost, Request, Set, Stop
from cosmos_core.transport.reports import REPORT, Report
from tests.simulation.replicas import World
from tests.simulation.simulator.controller import Controller
from tests.simulation.simulator.disk import Disk
from tests.simulation.simulator.faults import Faults
from tests.simulation.simulator.network import Agenda, Network, Person
from tests.simulation.simulator.outcome import check_outcome, progress_of
from tests.simulation.simulator.processes import Processes
from tests.simulation.simulator.replica import Replica
from tests.simulation.simulator.scenario import Scenario
from tests.simulation.simulator.trace import Trace
from tests.simulation.simulator.witness import LAUNCHER, Violation, Witness

_STEP_S: Final = 0.1
_WITHIN_S: Final = 240.0
_LEFT: Final = 0.5
"""Chance that a run that was stopped is left at that."""
_DOWN_S: Final = (0.05, 0.5, 4.0)
_WANTED: Final = (2, 7, 3, 9)
"""How often people want a run to be stopped, a replica to leave, another one, another value of a dynamic key."""
_FAILING: Final = 0.3
"""Chance that who is asked to leave is about to fail."""


class Simulation:
    """A run, by a seed alone.

    Args:
        seed: Decides everything that is not given.
        scenario: The run; of the seed, if it is not given.
        faults: What goes wrong; of the seed, if it is not given.
        kept: How many of the last events the trace keeps.

    Attributes:
        agenda: Simulated time.
        controller: The controller's process.
        disk: What it has made durable.
        faults: What goes wrong at present.
        network: Carries messages.
        people: Those who asked for something.
        replicas: Processes by name, the newest of each.
        scenario: As given.
        trace: The last events.
        witness: The oracles.
        world: What the replicas share.
    """

    def __init__(
        self, seed: int, *, scenario: Scenario | None = None, faults: Faults | None = None, kept: int = 60
    ) -> None:
        self.scenario: Final = Scenario.drawn(seed) if scenario is None else scenario
        self.faults = self._planned = Faults.drawn(seed) if faults is None else faults
        settings = self.scenario.settings
        self._seed: Final = seed
        self._rng: Final = self._stream("faults")
        self.agenda: Final = Agenda()
        self.trace: Final = Trace(kept)
        self.people: Final[list[Person]] = []
        self.network: Final = Network(self.agenda, self._stream("network"), self.faults)
        self.world: Final = World(
            group_size=settings.rollout_group_size, heldout_rows=settings.heldout_rows, rng=self._stream("world")
        )
        self.disk: Final = Disk(self._stream("disk"), self.faults)
        self.disk.committed.append(EVENTS.encode(RunOpened(settings=settings)))
        self.witness: Final = Witness(self.disk)
        self.controller: Final = Controller(
            agenda=self.agenda,
            rng=self._stream("controller"),
            faults=self.faults,
            control=self.scenario.control,
            disk=self.disk,
            witness=self.witness,
            trace=self.trace,
            say=self._say_down,
            policies=lambda: self._processes.policies(self.state),
        )
        self._processes: Final = Processes(
            self.scenario,
            self.faults,
            agenda=self.agenda,
            world=self.world,
            witness=self.witness,
            trace=self.trace,
            stream=self._stream,
            say=self._say_up,
            state=lambda: self.state,
        )
        self.replicas: Final = self._processes.replicas
        self._processes.start_all()
        self.agenda.after(_STEP_S, self._misfortune)

    @property
    def state(self) -> State:
        """Of the run, all that is durable and what is about to be."""
        return self.witness.state

    def reports(self, kind: type[Report]) -> list[Report]:
        """Those reports of a kind that the journal has."""
        events = (EVENTS.decode(data) for data in self.disk.committed)
        reports = (REPORT.decode(event.report) for event in events if isinstance(event, Reported))
        return [report for report in reports if isinstance(report, kind)]

    def run(self) -> State:
        """Let the run happen; its last state.

        Raises:
            Violation: An oracle does not hold; the message says how the run is replayed.
        """
        try:
            self._run()
        except Violation as violation:
            raise Violation(violation.oracle, self._snapshot(violation)) from violation
        return self.state

    def _snapshot(self, violation: Violation) -> str:
        """What was seen, the last of what happened, and how it is seen again."""
        told = "\n".join(self.trace.lines())
        drawn = "" if self._planned == Faults.drawn(self._seed) else f" --faults {self._planned}"
        again = f"again: python -m tests.simulation.simulator --seed {self._seed}{drawn} --trace"
        if self.scenario != Scenario.drawn(self._seed):
            again = "the run is one that this seed would not draw: see the test that made it"
        return (
            f"{str(violation).partition(': ')[2]}\nlast of what happened:\n{told}\nat {self.agenda.now:.2f} s of seed "
            f"{self._seed}, faults {self._planned}, {self.scenario.settings}\n{again}"
        )

    def _run(self) -> None:
        while self.agenda.now < self._planned.until_s and not (self._is_over() and not self._is_resumed()):
            self._proceed()
        self._calm()
        end = self.agenda.now + _WITHIN_S
        while not self._is_over():
            if self.agenda.now > end:
                raise Violation("liveness", f"nothing went wrong for {_WITHIN_S:g} s: {progress_of(self.state)}")
            self._proceed()
        was_stopped = any(isinstance(person.request, Stop) for person in self.people)
        check_outcome(self.state, self.scenario.settings, was_stopped=was_stopped)

    def _proceed(self) -> None:
        self.agenda.proceed()
        if self.scenario.settings.takes_turns and len(awake := self._processes.awake(self.state)) > 1:
            raise Violation("turns", f"{awake} are awake in turn {self.state.turn}, on the same GPUs")

    def _is_resumed(self) -> bool:
        """Whether a run that was stopped goes on."""
        if self.state.outcome != "stopped" or not self.faults.outage or self._rng.random() < _LEFT:
            return False
        self._resume()
        return not self.state.has_ended

    def _is_over(self) -> bool:
        """Whether the run has ended, and whoever says so lives."""
        return self.state.has_ended and self.controller.is_up

    def _calm(self) -> None:
        """Faults cease: who stands still goes on, links carry, there is room on the disk."""
        self.faults = attrs.evolve(self._planned, **dict.fromkeys(_CALMED, 0.0))
        self.network.faults = self.disk.faults = self.controller.faults = self.faults
        self._processes.calm(self.faults)
        self.network.mend()
        self.disk.is_full = False

    def _resume(self) -> None:
        """Every process ends, and the run goes on from its newest checkpoint, if it has one."""
        is_lost = self._rng.random() < self.faults.journal_loss
        saved = self.state.checkpoints.saved.keys()
        if not (saved & self.disk.snapshots.keys() if is_lost else saved):
            return
        self.controller.kill("ends with everybody else: the run is resumed")
        for replica in self.replicas.values():
            replica.end("ends with everybody else")
        step = self.disk.go_on(self.state, is_lost=is_lost)
        if step is None:
            return
        self.trace.note(self.agenda.now, "people", f"resume the run from step {step}, journal lost: {is_lost}")
        if is_lost:
            self.network.forget()
            for person in self.people:
                person.give_up()
            self.witness.reopen()
        else:
            self.witness.forget()
            self._delay_hellos()
        self._processes.start_all(step)

    def _delay_hellos(self) -> None:
        """What those who have ended said long ago may arrive only when the run has gone on without them."""
        late = self._stream(f"hellos before {self._processes.num_named}")
        for replica in self.replicas.values():
            self.network.deliver_late(4 * late.random(), functools.partial(self.controller.hear, *replica.hello))

    def _say_up(self, identity: bytes, data: bytes) -> None:
        link = identity.decode().partition("|")[0]
        self.network.carry(link, data, functools.partial(self.controller.hear, identity))

    def _say_down(self, identity: bytes, data: bytes, after: float) -> bool:
        name, _, incarnation = identity.decode().partition("|")
        self.network.carry(name, data, functools.partial(self._deliver, name, incarnation), after=after)
        replica = self.replicas.get(name)
        return replica is not None and replica.incarnation == incarnation and replica.is_up

    def _deliver(self, name: str, incarnation: str, data: bytes) -> None:
        replica = self.replicas.get(name)
        if replica is not None and replica.incarnation == incarnation:
            replica.hear(data)
        for person in self.people:
            if person.name == name:
                person.hear(data)

    def _misfortune(self) -> None:
        """Draw what goes wrong in the next moment, and start again what has ended."""
        faults = self.faults
        for name, replica in list(self.replicas.items()):
            self._revive(name, replica)
            if not replica.is_up or self.state.outcome:
                continue
            if self._happens(faults.crash):
                replica.end("is killed")
                replica.is_gone = self._is_gone_for_good(replica)
                self._tell_of(replica)
            if faults.wreck and replica.is_at_stake(is_leaving=self._is_leaving(replica)):
                self._wreck(replica)
            if self._happens(faults.hang):
                replica.hang()
            if self._happens(faults.stuck):
                replica.get_stuck()
            if self._happens(faults.freeze) and not replica.is_frozen:
                replica.freeze(self._rng.random() * 6)
            if self._happens(faults.cut):
                self._cut(name, self._rng.random() * 6)
        self._misfortune_of_all()
        self.agenda.after(_STEP_S, self._misfortune)

    def _cut(self, name: str, seconds: float) -> None:
        if self.agenda.now < self._planned.until_s:
            self.trace.note(self.agenda.now, name, "is cut off")
            self.network.cut(name, seconds)

    def _cut_soon(self, name: str) -> None:
        seconds = 3 * self._rng.random()
        self.agenda.after(self._rng.random(), lambda: self._cut(name, seconds))

    def _is_leaving(self, replica: Replica) -> bool:
        known = self.state.replicas.get(replica.name)
        return known is not None and known.incarnation == replica.incarnation and known.is_leaving

    def _wreck(self, left: Replica) -> None:
        """Nobody but one is left of the policy, and is not heard: what it has taken over is not known of it."""
        longest = self.scenario.control.lost_after_s
        self._cut(left.name, longest * (0.5 + 0.5 * self._rng.random()))
        others = [each for name, each in self.replicas.items() if name.startswith("p") and each is not left]
        self.agenda.after(0.1 + 0.4 * self._rng.random(), lambda: self._end(others))

    def _end(self, replicas: list[Replica]) -> None:
        for replica in replicas:
            if replica.is_up and self.faults.wreck:
                replica.end("is killed with all others of the policy but one")
                self._tell_of(replica, chance=1.0)

    def _misfortune_of_all(self) -> None:
        faults = self.faults
        if self._happens(faults.controller_crash):
            self.controller.kill("is killed")
            if not self.state.outcome and self._rng.random() < faults.power_cut:
                self._cut_power()
        if self._happens(faults.disk_full) and not self.disk.is_full:
            self.trace.note(self.agenda.now, "disk", "is full")
            self.disk.is_full = True
            self.agenda.after(self._rng.random() * 5, self._make_room)
        if self._happens(faults.people):
            self._ask()
        if self._happens(faults.sets):
            self._set(self._tightening())
        if not self.state.outcome and self._happens(faults.outage):
            self._resume()

    def _cut_power(self) -> None:
        """The end of the journal is lost, and with it those who were told of it and have no way to find that out."""
        present = self.state
        left = self.disk.lose_end()
        if left is None:
            return
        self.trace.note(self.agenda.now, "disk", f"lost the journal after event {len(self.disk.committed)}")
        self.witness.lose_end()
        for replica in self.replicas.values():
            is_told = self.witness.told_at.get(replica.incarnation, 0) > len(self.disk.committed)
            knows = left.term < present.term or replica.acknowledged > self.witness.durable.get(replica.incarnation, 0)
            if is_told and not knows:
                replica.end("is killed by the power cut")
            # That it left, or that it was not needed any more, may be lost.
            replica.has_left = replica.is_gone = False

    def _happens(self, rate: float) -> bool:
        return rate > 0 and self._rng.random() < rate * _STEP_S

    def _is_gone_for_good(self, replica: Replica) -> bool:
        others = [each for each in self.replicas.values() if each.is_up and each.name[0] == replica.name[0]]
        if not others or not self.faults.gone:
            return False
        is_complete = self.state.has_started if replica.name.startswith("p") else self.state.has_rollouts
        return is_complete and self._rng.random() < self.faults.gone

    def _revive(self, name: str, replica: Replica) -> None:
        if replica.refusal and replica.is_up:
            replica.end(f"ends: {replica.refusal}")
        may_come_back = not replica.has_left and not replica.is_gone
        if not replica.is_up and may_come_back and replica.back_at is None:
            replica.back_at = self.agenda.now + self._rng.random() * self._rng.choice(_DOWN_S)
        if replica.back_at is not None and self.agenda.now >= replica.back_at and not self.state.outcome:
            self._processes.start(name)

    def _make_room(self) -> None:
        self.trace.note(self.agenda.now, "disk", "has room")
        self.disk.is_full = False

    def _ask(self) -> None:
        """Somebody wants something."""
        rng, settings = self._rng, self.scenario.settings
        match rng.choices(("stop", "drain", "start", "set"), _WANTED)[0]:
            case "stop":
                self._request(Stop())
            case "drain":
                name = rng.choice(sorted(self.replicas))
                self._request(Drain(name=name))
                if rng.random() < _FAILING:
                    self._cut_soon(name)
            case "start":
                self._processes.start_another("r" if settings.rollout_replicas and rng.random() < 0.5 else "p")
            case _:
                self._set()

    def _set(self, override: str = "") -> None:
        key = self._rng.choice(self.scenario.settings.dynamic).key
        self._request(Set(overrides=(override or f"{key}={self._rng.randrange(5)}",)))

    def _tightening(self) -> str:
        """A bound on staleness that the oldest finished prompt will not meet after the next step; empty: none."""
        versions = [group.oldest_version for group in self.state.ledger.finished.values()]
        age = self.state.step + 1 - min(versions, default=self.state.step)
        return f"sync.max_staleness={age - 1}" if age > 1 and self.state.stage.uses_rollouts else ""

    def _request(self, request: Request, whose: str = "person") -> None:
        name = f"{whose}-{len(self.people)}"
        self.people.append(Person(name, request, agenda=self.agenda, trace=self.trace, say=self._say_up))

    def _tell_of(self, replica: Replica, *, chance: float = 0.5) -> None:
        """The launcher may see that a process has ended, and say so."""
        if self._rng.random() < chance:
            lost = Lost(name=replica.name, incarnation=replica.incarnation, reason="its process ended")
            self._request(lost, LAUNCHER)

    def _stream(self, purpose: str) -> random.Random:
        """Randomness of its own for each purpose: one fault more leaves the others where they were."""
        return random.Random(f"{purpose} of {self._seed}")


_CALMED: Final = tuple(
    field.name for field in attrs.fields(Faults) if field.name not in ("delay_s", "slow_s", "until_s")
)
