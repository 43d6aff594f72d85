"""Seeded runs over a network that loses, repeats and reorders, with replicas and controllers that crash.

Both ends are the real ones without their sockets: the replicas' `Session`, the controller's `Desk`.
"""

from __future__ import annotations

import heapq
import random

import attrs
import pytest

from cosmos_core.config.schema import ControlConfig
from cosmos_core.controller.desk import Desk
from cosmos_core.controller.machine import core
from cosmos_core.controller.machine.events import EVENTS, ControllerStarted, Event, Reported, RunOpened
from cosmos_core.controller.machine.invariants import check
from cosmos_core.controller.machine.settings import StageSettings
from cosmos_core.controller.machine.state import State
from cosmos_core.replica.session import Session
from cosmos_core.testing.replicas import FakePolicy, FakeRollout, World
from cosmos_core.transport.messages import WIRE_VERSION, Directive, Hello
from cosmos_core.transport.outbox import Outbox
from cosmos_core.transport.reports import WeightsLoaded, WeightsRejected
from cosmos_core.transport.wire import DOWN, REPORT, UP

TICK_S = 0.05
CONTROL = ControlConfig(heartbeat_s=0.5, lost_after_s=3.0, join_timeout_s=60.0)


class Ledgers:
    """Where every prompt of every stage ever was: what is terminal once stays so, and is counted once."""

    def __init__(self, state: State) -> None:
        self.live: list[set[int]] = [set() for _ in state.ledgers]
        self.over: list[set[int]] = [set() for _ in state.ledgers]

    def observe(self, state: State) -> None:
        for index, ledger in enumerate(state.ledgers):
            now = {*ledger.queued, *ledger.in_flight, *ledger.finished, *ledger.claimed}
            known = self.live[index] | self.over[index]
            given_out = set(range(len(known), ledger.next_position))
            self.over[index] |= (self.live[index] | given_out) - now
            self.live[index] = now
            assert not now & self.over[index], "a prompt came back from its end"
            assert len(self.over[index]) == ledger.consumed + ledger.num_dropped


class MemoryJournal:
    """Keeps committed events apart from those that a crash would lose."""

    def __init__(self) -> None:
        self.committed: list[bytes] = []
        self.pending: list[bytes] = []

    def append(self, event: Event) -> int:
        self.pending.append(EVENTS.encode(event))
        return len(self.committed) + len(self.pending)

    def commit(self) -> int:
        self.committed += self.pending
        self.pending = []
        return len(self.committed)

    def reports(self, kind: type) -> list:
        events = (EVENTS.decode(data) for data in self.committed)
        reports = (REPORT.decode(event.report) for event in events if isinstance(event, Reported))
        return [report for report in reports if isinstance(report, kind)]

    def fold(self) -> State:
        return core.fold(EVENTS.decode(data) for data in self.committed)


class CheckedDesk(Desk):
    """Checks every invariant after every event."""

    ledgers: Ledgers | None = None

    def _record(self, event: Event) -> None:
        super()._record(event)
        check(self.state)
        if self.ledgers is not None:
            self.ledgers.observe(self.state)


@attrs.define
class Process:
    """A replica: the protocol, the work, and whether it lives."""

    name: str
    session: Session
    fake: FakePolicy | FakeRollout
    back_at: float = 0.0
    is_up: bool = True


@attrs.define(kw_only=True)
class Faults:
    loss: float = 0.05
    repeat: float = 0.05
    crash: float = 0.0
    controller_crash: float = 0.0


class Simulation:
    def __init__(self, seed: int, settings, faults: Faults, *, policies: int, rollouts: int) -> None:
        self.rng = random.Random(seed)
        self.faults = faults
        self.now = 0.0
        self.network: list[tuple[float, int, str, bytes]] = []
        self.count = 0
        self.world = World(group_size=settings.group_size, heldout_rows=settings.heldout_rows, rng=self.rng)
        self.journal = MemoryJournal()
        self.journal.append(RunOpened(settings=settings))
        self.journal.commit()
        self.ledgers = Ledgers(self.journal.fold())
        self.desk = self.start_controller()
        names = [f"p{index}" for index in range(policies)] + [f"r{index}" for index in range(rollouts)]
        self.processes = {name: self.start(name) for name in names}

    def start_controller(self) -> CheckedDesk:
        state = self.journal.fold()
        started = ControllerStarted(term=state.term + 1)
        self.journal.append(started)
        core.step(state, started)
        self.journal.commit()
        desk = CheckedDesk(state, self.journal, CONTROL, self.now)
        desk.ledgers = self.ledgers
        return desk

    def start(self, name: str) -> Process:
        self.count += 1
        incarnation = f"{name}/{self.count}"
        fake = (
            FakePolicy(self.world, name, incarnation)
            if name.startswith("p")
            else FakeRollout(self.world, incarnation, rng=self.rng, drop_every=5)
        )
        hello = Hello(
            wire=WIRE_VERSION,
            run_id="run",
            name=name,
            role="policy" if name.startswith("p") else "rollout",
            incarnation=incarnation,
            # Few hosts, and fewer racks: some replicas share them.
            host=f"host-{name[-1]}" if name.startswith("p") else f"host-{self.count % 3}",
            rack=f"rack-{self.count % 2}",
            pid=self.count,
            step=0,
            endpoints=fake.endpoints,
        )
        session = Session(hello, heartbeat_s=CONTROL.heartbeat_s, gauges=dict, outbox=Outbox())
        return Process(name, session, fake)

    def send(self, to: str, data: bytes) -> None:
        if self.rng.random() < self.faults.loss:
            return
        for _ in range(2 if self.rng.random() < self.faults.repeat else 1):
            self.count += 1
            delay = self.rng.random() * self.rng.choice((0.1, 0.1, 1.0))
            heapq.heappush(self.network, (self.now + delay, self.count, to, data))

    def turn(self) -> None:
        self.now += TICK_S
        while self.network and self.network[0][0] <= self.now:
            _, _, to, data = heapq.heappop(self.network)
            name, _, incarnation = to.partition("|")
            if name == "desk":
                self.desk.take(incarnation.encode(), UP.decode(data), self.now)
            elif (process := self.processes.get(name)) and process.session.hello.incarnation == incarnation:
                process.session.receive(DOWN.decode(data), self.now)
        self.desk.tick(self.now)
        for identity, message in self.desk.commit(self.now):
            self.send(identity.decode(), DOWN.encode(message))
        assert self.journal.pending == []
        if self.rng.random() < self.faults.controller_crash:
            replayed = self.journal.fold()
            assert replayed == self.desk.state
            self.desk = self.start_controller()
        for name in list(self.processes):
            self.work(self.processes[name])

    def may_crash(self, process: Process) -> bool:
        """Whether enough is left to go on: a rollout replica always comes back, weights only live in policies."""
        if not process.is_up or self.desk.state.outcome:
            return False
        if isinstance(process.fake, FakeRollout):
            return True
        others = [other for other in self.processes.values() if other.is_up and other is not process]
        return any(isinstance(other.fake, FakePolicy) and other.fake.step >= process.fake.step for other in others)

    def work(self, process: Process) -> None:
        if self.rng.random() < self.faults.crash and self.may_crash(process):
            process.is_up = False
            process.fake.end()
            process.back_at = self.now + self.rng.random() * self.rng.choice((0.2, 8.0))
        if not process.is_up or process.session.refusal:
            if self.now >= process.back_at:
                process.fake.end()
                self.processes[process.name] = self.start(process.name)
            return
        directive = process.session.directive
        if isinstance(directive, Directive) and self.rng.random() < 0.7:
            body = directive.policy or directive.rollout
            for report in process.fake.follow(body):
                process.session.outbox.append(REPORT.encode(report))
        if isinstance(process.fake, FakePolicy):
            process.session.set_step(process.fake.step)
        while (message := process.session.next_message(self.now)) is not None:
            identity = f"{process.name}|{process.session.hello.incarnation}"
            self.send(f"desk|{identity}", UP.encode(message))
            process.session.sent(message, self.now)

    def run(self, limit_s: float = 400.0) -> State:
        while not self.desk.state.outcome and self.now < limit_s:
            self.turn()
        for _ in range(100):
            self.turn()
        return self.desk.state


def options(seed: int) -> dict:
    rng = random.Random(seed)
    synchronous = rng.random() < 0.3
    interval = 1 if synchronous else rng.choice((1, 1, 2))
    return {
        "warmup": rng.choice((0, 2)),
        "steps": 6,
        "prompts": rng.choice((2, 4)),
        "num_policies": rng.choice((1, 2, 3)),
        "num_rollouts": rng.choice((1, 2, 3, 6)),
        "synchronous": synchronous,
        "max_staleness": 0 if synchronous else rng.choice((interval - 1, 1, 3)),
        "sync_interval": interval,
        "evaluation_prompts": rng.choice((0, 5)),
        "evaluation_interval": rng.choice((0, 2, 3)),
        "checkpoint_interval": rng.choice((0, 2)),
        "fan_out": rng.choice((1, 1, 2, 8)),
        "shares_memory": rng.random() < 0.3,
    }


def imitating(seed: int) -> dict:
    """A run that learns from demonstrations, and measures the loss of held-out ones; some score completions, too."""
    rng = random.Random(seed)
    scores = rng.random() < 0.5
    steps = rng.choice((5, 6, 9))
    stage = StageSettings(
        source="demonstrations", first_version=0, steps=steps, prompts_per_step=rng.choice((2, 4)), min_group_size=1
    )
    return {
        "stages": (stage,),
        "num_policies": rng.choice((1, 2, 3)),
        "num_rollouts": rng.choice((1, 2)) if scores else 0,
        "rewards": ("right",) if scores else (),
        "evaluation_prompts": 4 if scores else 0,
        "heldout_rows": rng.choice((1, 3, 7)),
        "evaluation_interval": rng.choice((0, 1, 2, 3)),
        "checkpoint_interval": rng.choice((0, 2)),
    }


@pytest.mark.parametrize("seed", range(40))
def test_a_run_finishes_whatever_happens(seed, settings):
    chosen = options(seed)
    faults = Faults(crash=0.004 if seed % 2 else 0.0, controller_crash=0.01 if seed % 3 else 0.0)
    simulation = Simulation(
        seed,
        settings(**chosen),
        faults,
        policies=chosen["num_policies"],
        rollouts=chosen["num_rollouts"],
    )
    state = simulation.run()
    assert state.outcome == "finished", (state.reason, chosen, simulation.now, state)
    assert state.step == state.settings.last_step
    assert simulation.journal.fold() == state
    for record in state.steps:
        assert record.staleness_max <= state.settings.max_staleness
        assert record.num_groups == state.settings.stages[record.stage].prompts_per_step
    check_evaluations(state)


def check_evaluations(state: State) -> None:
    """Every evaluation that was due was made once, or is said to be lost."""
    versions = range(state.step + 1)
    scored = [done.version for done in state.evaluations if done.accuracy is not None]
    measured = [done for done in state.evaluations if done.loss is not None]
    lost = "evaluation" in state.status_details
    assert lost or scored == [version for version in versions if state.settings.evaluates(version)]
    assert lost or [done.version for done in measured] == [
        version for version in versions if state.settings.measures(version)
    ]
    assert all(done.num_prompts == state.settings.heldout_rows for done in measured)
    assert len(set(scored)) == len(scored)
    assert len({done.version for done in measured}) == len(measured)


@pytest.mark.parametrize("seed", range(30))
def test_held_out_losses_are_measured_whatever_happens(seed, settings):
    chosen = imitating(seed)
    faults = Faults(crash=0.004 if seed % 2 else 0.0, controller_crash=0.01 if seed % 3 else 0.0)
    simulation = Simulation(
        seed, settings(**chosen), faults, policies=chosen["num_policies"], rollouts=chosen["num_rollouts"]
    )
    state = simulation.run()
    assert state.outcome == "finished", (state.reason, chosen, simulation.now)
    assert simulation.journal.fold() == state
    check_evaluations(state)
    assert any(done.loss is not None for done in state.evaluations)
    assert all(
        done.num_units == 3 * (done.num_prompts - done.num_unscored)
        for done in state.evaluations
        if done.loss is not None
    )


def test_a_simulation_is_the_same_again(settings):
    def outcome() -> State:
        chosen = options(3) | {"num_rollouts": 3}
        faults = Faults(crash=0.004, controller_crash=0.01)
        return Simulation(3, settings(**chosen), faults, policies=3, rollouts=3).run()

    assert outcome() == outcome()


@pytest.mark.parametrize("seed", range(12))
def test_replicas_pass_weights_on_whatever_happens(seed, settings):
    chosen = options(seed) | {"num_rollouts": 6, "fan_out": 1 + seed % 2, "shares_memory": False}
    faults = Faults(crash=0.004 if seed % 3 else 0.0, controller_crash=0.01 if seed % 2 else 0.0)
    simulation = Simulation(seed, settings(**chosen), faults, policies=chosen["num_policies"], rollouts=6)
    state = simulation.run()
    assert state.outcome == "finished", (state.reason, chosen, simulation.now)
    assert simulation.journal.fold() == state
    loads = simulation.journal.reports(WeightsLoaded)
    assert sum(load.relayed for load in loads) > len(loads) / 4
    assert seed or simulation.journal.reports(WeightsRejected)


@pytest.mark.parametrize("seed", [0, 1])
def test_without_faults_nothing_is_lost(seed, settings):
    chosen = options(seed) | {"synchronous": False, "max_staleness": 1, "sync_interval": 1, "num_rollouts": 3}
    state = Simulation(seed, settings(**chosen), Faults(loss=0.0, repeat=0.0), policies=3, rollouts=3).run()
    assert state.outcome == "finished"
    assert not state.fenced
    assert all("lost" not in ledger.samples.dropped for ledger in state.ledgers)
    assert all(record.attempt == 1 for record in state.steps)
