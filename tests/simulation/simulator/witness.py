"""The oracles: what must hold of a run whatever happens to it.

| oracle | what it holds |
|---|---|
| conservation | the machine's own invariants after every event |
| terminal | a prompt that was consumed or dropped never comes back, and is counted once |
| fence | a stale message, or a stale report in a fresh one, changes nothing; who was given up stays out |
| batch | each step's batch is on record once, whole, of usable prompts, and no prompt is in two of them |
| lease | a lease is given to who has room, with weights that will not be too old |
| evaluation | a version is evaluated once, whole, with exactly its weights |
| request | what was asked for and taken in is so; a run ends at a step of which there is a checkpoint |
| told | each replica was told what the state wants of it, once a turn is over |
| weights | published weights, and those of policies in the run, are what the batches on record make of the first ones |
| versions | those are published that are due, and kept while they may be loaded; a policy has the one that it told of |
| digest | a rollout replica that loaded anything else than what was published generates nothing and passes nothing on |
| drain | who drains gets nothing new, leaves with nothing that anybody waits for, and is out of the run then |
| settings | every attempt at a step goes by the same dynamic keys, those asked for, which are on record with it |
| staleness | no batch has a sample older than the bound |
| durable | nothing is said before what it follows from is durable; the journal has each report as it was made, once |
| replay | the journal alone leads to the state that the controller has |
| snapshot | the journal has what each snapshot is of, or says that the run was taken back from it |
| turns | of pools that share GPUs, never are replicas of both awake in a run |
| once | a process never goes back to an older directive, and hears nothing of an older term; no term begins twice |
| liveness | when faults cease, the run ends, as it should |
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Final

from cosmos_core.control.machine import core
from cosmos_core.control.machine.directives import Offers, directive_for
from cosmos_core.control.machine.events import (
    EVENTS,
    Commanded,
    ControllerStarted,
    Event,
    Recovered,
    ReplicaJoined,
    Reported,
    Resumed,
    RunOpened,
)
from cosmos_core.control.machine.invariants import check
from cosmos_core.control.machine.state import State
from cosmos_core.transport.directives import PolicyDirective, RolloutDirective
from cosmos_core.transport.messages import REQUEST, Acknowledged, Answer, Directive, Down, Set, Welcome
from cosmos_core.transport.reports import REPORT, Left, Report, StepFailed, WeightsLoaded, WeightsRejected
from tests.simulation.replicas import FakePolicy
from tests.simulation.simulator.disk import Disk, Opened
from tests.simulation.simulator.fences import changes, fingerprint, stale_event, told
from tests.simulation.simulator.history import History
from tests.simulation.simulator.holdings import Doubts, Holdings, withdrawn
from tests.simulation.simulator.promises import kept

LAUNCHER: Final = "launcher"
"""Begins the names of its requests: what it says is a fact about a replica, and is kept as that."""


class Violation(AssertionError):  # noqa: N818 - what is broken is the program, not the simulation
    """An oracle does not hold.

    Attributes:
        oracle: Its name, as in the table of this module.
    """

    def __init__(self, oracle: str, problem: str) -> None:
        super().__init__(f"{oracle}: {problem}")
        self.oracle: Final = oracle


class Witness:
    """Sees every event, every commit and everything that is said.

    Args:
        disk: Where the journal lies, opened.

    Attributes:
        durable: Number of the newest report in the journal, by incarnation.
        made: What each incarnation reported, in order.
        told_at: How much the journal had when each incarnation was last told something.
        commands: Requests of people in the journal.
        history: Of prompts, batches and weights.
        doubts: Who has weights that are not those published.
        holdings: Which weights policy replicas told that they hold.
        num_events: Events seen.
        num_stale: Of these and of messages, those that were stale.
    """

    def __init__(self, disk: Disk) -> None:
        self.durable: Final[dict[str, int]] = {}
        self.made: Final[dict[str, list[bytes]]] = {}
        self.told_at: Final[dict[str, int]] = {}
        self.commands: Final[dict[str, int]] = {}
        self.num_events = 0
        self.num_stale = 0
        self._disk: Final = disk
        self._read = 0
        self._newest_term = 0
        """Of those that somebody was told."""
        self._begun: History | None = None
        self._told: Final[dict[str, tuple[int, PolicyDirective | RolloutDirective | None]]] = {}
        """Term and content of the newest directive of each incarnation."""
        self._replay()

    @property
    def state(self) -> State:
        """The fold of all events seen, which nobody but this witness changes."""
        return self._state

    def forget(self) -> None:
        """The controller is gone, and with it what it had not made durable."""
        self._look_at_disk()
        self._replay()

    def lose_end(self) -> None:
        """The controller is gone, and with it the end of what it had made durable."""
        self._read = 0
        for known in (self.durable, self.commands, self._told):
            known.clear()
        self.forget()

    def reopen(self) -> None:
        """The run goes on from a checkpoint, in a journal that begins with it."""
        self._begun = self.history
        self._read = 0
        self.commands.clear()
        self._replay()

    def _replay(self) -> None:
        opened, *events = (EVENTS.decode(data) for data in self._disk.committed)
        assert isinstance(opened, RunOpened | Recovered)
        self._state = core.begin(opened)
        self.doubts, self.holdings = Doubts(), Holdings()
        if self._begun is None:
            self.history = History(self._state)
        else:
            self.history = copy.deepcopy(self._begun)
            self.history.promises.asked.recover(self._state.changes, self._state.step)
        for event in events:
            self._take(event)

    def observe(self, event: Event) -> None:
        """An event was appended to the journal."""
        self.num_events += 1
        if isinstance(event, ControllerStarted) and event.term <= self._newest_term:
            raise Violation("once", f"term {event.term} begins, and somebody was told of term {self._newest_term}")
        state = self._state
        report: Report | None = REPORT.decode(event.report) if isinstance(event, Reported) else None
        undone = self.history.undone
        stale = stale_event(state, event, report, undone) if isinstance(event, ReplicaJoined | Reported) else ""
        before = fingerprint(state) if stale else {}
        if isinstance(report, Left) and not stale:
            self._check_farewell(event)
        known = state.published.get(report.version) if isinstance(report, WeightsLoaded) else None
        versions = set(state.published)
        self._take(event)
        _raise(withdrawn(versions, state, self._told))
        if isinstance(event, Reported) and isinstance(report, Left) and not stale and event.name in state.replicas:
            raise Violation("drain", f"{event.name} has left, and is in the run")
        if stale and isinstance(event, ReplicaJoined | Reported):
            self.num_stale += 1
            if changed := changes(before, fingerprint(state)) - told(event, report, undone):
                raise Violation("fence", f"{sorted(changed)} changed by {event.name}, though {stale}")
        if isinstance(event, Reported) and isinstance(report, WeightsLoaded):
            self._check_load(event, report, known.digest if known else None)

    def _take(self, event: Event) -> None:
        state = self._state
        running, step = state.running, state.step
        self._look_at(state, event)
        core.step(state, event)
        try:
            check(state)
        except AssertionError as error:
            raise Violation("conservation", str(error)) from error
        _raise(self.holdings.observe(state))
        _raise(self.history.observe(state, running, step, is_resumed=isinstance(event, Resumed)))
        if isinstance(event, Commanded) and not state.outcome:
            _raise(kept(state, REQUEST.decode(event.request)))

    def _look_at(self, state: State, event: Event) -> None:
        """Note what is asked for, and what is said of payloads and weights by somebody who tried to fetch them."""
        if isinstance(event, Commanded) and event.ident not in state.commands:
            request = REQUEST.decode(event.request)
            if isinstance(request, Set):
                self.history.promises.asked.ask(request, state.step)
        report = REPORT.decode(event.report) if isinstance(event, Reported) else None
        if isinstance(event, Reported):
            self.holdings.hear(state, event, report, self.history.undone)
        if not isinstance(event, Reported) or stale_event(state, event, report, self.history.undone):
            return
        if isinstance(report, StepFailed):
            self.history.promises.lose(report.missing)
        if isinstance(report, WeightsLoaded | WeightsRejected):
            self.doubts.hear(state, event.incarnation, report)

    def _check_farewell(self, event: Event) -> None:
        replica = self._state.replicas[event.name] if isinstance(event, Reported) else None
        if replica is not None and (replica.leases or replica.held or not replica.is_leaving):
            raise Violation("drain", f"{replica.name} leaves with leases {replica.leases}, holding {replica.held}")
        generation = self._state.generation
        if replica is not None and generation is not None and replica.name in generation.order.members:
            raise Violation("drain", f"{replica.name} leaves its gradient group, {generation.order}")

    def _check_load(self, event: Reported, report: WeightsLoaded, published: str | None) -> None:
        replica = self._state.replicas.get(event.name)
        is_there = replica is not None and replica.incarnation == event.incarnation
        if is_there and report.digest != published and replica is not None and replica.version >= 0:
            raise Violation("digest", f"{event.name} may generate with {report.digest!r}, published is {published!r}")

    def compare(self, live: State, policies: Iterable[FakePolicy]) -> None:
        """Compare the controller's state with what the journal leads to, and with the weights that there are."""
        if live != self._state:
            ours, its = fingerprint(self._state), fingerprint(live)
            raise Violation("replay", f"{sorted(changes(ours, its)) or 'the order of something'} differs")
        _raise(self.history.diverged(live, policies))
        self._check_told(live)

    def _check_told(self, live: State) -> None:
        offers = Offers(live)
        for replica in live.replicas.values():
            term, content = self._told.get(replica.incarnation, (0, None))
            if term == live.term and content != (wanted := directive_for(live, replica.name, offers)):
                raise Violation("told", f"{replica.name} was told {content}, wanted is {wanted}")

    def committed(self) -> None:
        """Something was made durable: the journal has each report once, as it was made."""
        self._look_at_disk()

    def _look_at_disk(self) -> None:
        for data in self._disk.committed[self._read :]:
            event = EVENTS.decode(data)
            match event:
                case Reported():
                    made, number = self.made[event.incarnation], self.durable.get(event.incarnation, 0) + 1
                    if event.sequence != number or event.report != made[number - 1]:
                        raise Violation(
                            "durable",
                            f"the journal has report {event.sequence} of {event.incarnation}, due is {number}",
                        )
                    self.durable[event.incarnation] = number
                case Commanded():
                    if event.ident in self.commands:
                        raise Violation("durable", f"the journal has request {event.ident} twice")
                    self.commands[event.ident] = len(self.commands)
                case _:
                    pass
        self._read = len(self._disk.committed)

    def said(self, journal: Opened, incarnation: str, message: Down) -> None:
        """The controller says something to somebody."""
        if journal.pending:
            raise Violation(
                "durable", f"{type(message).__name__} is said, {len(journal.pending)} events are not durable"
            )
        self.told_at[incarnation] = len(self._disk.committed)
        match message:
            case Acknowledged() | Welcome() | Directive():
                self._newest_term = max(self._newest_term, message.term)
                if isinstance(message, Directive):
                    self._told[incarnation] = message.term, message.rollout or message.policy
                    if message.rollout is not None:
                        _raise(self.doubts.spread(incarnation, message.rollout))
                durable = self.durable.get(incarnation, 0)
                if message.acknowledged > durable:
                    raise Violation("durable", f"report {message.acknowledged} of {incarnation} is not in the journal")
            case Answer() if not message.ident.startswith(LAUNCHER):
                if not message.refusal and message.ident not in self.commands:
                    raise Violation("durable", f"request {message.ident} is answered and not in the journal")
            case _:
                pass


def _raise(problems: Iterable[tuple[str, str]]) -> None:
    for oracle, problem in problems:
        raise Violation(oracle, problem)
