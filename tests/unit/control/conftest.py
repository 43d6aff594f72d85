"""A run driven by hand: events in, directives out, invariants checked after each event."""

from __future__ import annotations

from typing import Any

import pytest

from cosmos_core.control.machine import core
from cosmos_core.control.machine.directives import directive_for
from cosmos_core.control.machine.events import (
    EVENTS,
    Commanded,
    Event,
    RegroupDue,
    ReplicaJoined,
    ReplicaLost,
    Reported,
    Resumed,
    RunOpened,
)
from cosmos_core.control.machine.invariants import check
from cosmos_core.control.machine.settings import Settings
from cosmos_core.transport.directives import Lease, PolicyDirective, RolloutDirective
from cosmos_core.transport.messages import REQUEST, Stop
from cosmos_core.transport.reports import REPORT, GroupFinished, Report
from cosmos_core.types import Sample, SampleStatus
from tests.run_settings import demonstrations, rollouts, small_settings
from tests.simulation.replicas import FakePolicy, FakeRollout, World


def make_settings(*, warmup: int = 0, steps: int = 3, prompts: int = 2, **changes) -> Settings:
    """A small rollouts run: `prompts` groups of 4 a step, two of which are in flight on a replica."""
    stages = [rollouts(warmup, steps, prompts)]
    if warmup:
        stages.insert(0, demonstrations(0, warmup, 3))
    return small_settings(*stages, **changes)


def sample(index=0, *, version=0, newest=None, status="ok", reward=1.0, units=10) -> Sample:
    return Sample(
        index=index,
        status=SampleStatus(status),
        reward=reward if status in ("ok", "truncated") else None,
        rewards={"right": reward} if status in ("ok", "truncated") else {},
        oldest_version=version,
        newest_version=version if newest is None else newest,
        num_units=units,
        num_prompt_units=5,
    )


class Run:
    """A run and the events that made it."""

    def __init__(self, settings: Settings) -> None:
        self.events: list[Event] = [RunOpened(settings=settings)]
        self.state = core.fold(self.events)
        self.world = World(group_size=settings.rollout_group_size)
        self.fakes: dict[str, FakePolicy | FakeRollout] = {}
        self.incarnations: dict[str, str] = {}

    def apply(self, event: Event) -> None:
        self.events.append(EVENTS.decode(EVENTS.encode(event)))
        core.step(self.state, self.events[-1])
        check(self.state)

    def join(self, name: str, *, step: int = 0, host: str = "host", rack: str = "") -> None:
        """A replica joins; a second time, as another process."""
        incarnation = f"{name}#{sum(isinstance(event, ReplicaJoined) for event in self.events)}"
        role = "policy" if name.startswith("p") else "rollout"
        fake = (
            FakePolicy(self.world, name, incarnation, step)
            if role == "policy"
            else FakeRollout(self.world, incarnation)
        )
        self.fakes[name], self.incarnations[name] = fake, incarnation
        self.apply(
            ReplicaJoined(
                name=name,
                role=role,
                incarnation=incarnation,
                host=host,
                rack=rack,
                pid=1,
                step=step,
                endpoints=fake.endpoints,
            )
        )

    def lose(self, name: str) -> None:
        self.fakes.pop(name).end()
        self.apply(ReplicaLost(name=name, incarnation=self.incarnations[name], reason="silent"))

    def report(self, name: str, *reports: Report) -> None:
        for report in reports:
            replica = self.state.replicas[name]
            self.apply(
                Reported(
                    name=name,
                    incarnation=replica.incarnation,
                    sequence=replica.received + 1,
                    report=REPORT.encode(report),
                )
            )

    def directive(self, name: str) -> PolicyDirective | RolloutDirective:
        return directive_for(self.state, name)

    def follow(self, *names: str) -> bool:
        """Let replicas do what their directives say, once; whether anything was reported."""
        reported = False
        for name in names or sorted(self.fakes):
            reports = self.fakes[name].follow(self.directive(name))
            reported = reported or bool(reports)
            self.report(name, *reports)
            if name not in self.state.replicas:
                self.fakes.pop(name).end()
        return reported

    def settle(self, *names: str) -> None:
        """Let replicas do what their directives say until there is nothing left to do."""
        for _ in range(10_000):
            if not self.follow(*names):
                if not self.state.is_regrouping:
                    return
                self.apply(RegroupDue())
        raise AssertionError("the run does not come to rest")

    def train(self, name: str = "p0") -> None:
        """One policy replica does what there is for it to do, once."""
        self.follow(name)

    def leases(self, name: str = "r0") -> list[Lease]:
        directive = self.directive(name)
        assert isinstance(directive, RolloutDirective)
        return list(directive.leases)

    def finish(self, name: str, lease: Lease, *samples: Sample, **more: Any) -> None:
        """Report a group; its payloads exist."""
        self.world.payloads[self.fakes[name].endpoints["payloads"]].add(lease.lease)
        number = self.world.group_size if lease.purpose == "train" else 1
        samples = samples or tuple(sample(index, version=self.fakes[name].version) for index in range(number))
        self.report(name, GroupFinished(lease=lease.lease, samples=samples, **more))

    def stop(self) -> None:
        self.apply(Commanded(ident="stop", request=REQUEST.encode(Stop())))

    def resume(self, step: int, settings: Settings | None = None) -> None:
        """All processes end; the run goes on from a checkpoint, maybe with other settings."""
        for fake in self.fakes.values():
            fake.end()
        self.fakes.clear()
        self.apply(Resumed(step=step, settings=settings or self.state.settings))

    def start(self, policies: int = 1, rollouts: int = 1) -> None:
        """All replicas join, the first weights are loaded, nothing is generated yet."""
        for index in range(policies):
            self.join(f"p{index}")
        for index in range(rollouts):
            self.join(f"r{index}")
        for index in range(policies):
            self.follow(f"p{index}")
        for index in range(policies):
            self.follow(f"p{index}")
        for index in range(rollouts):
            rollout = self.fakes[f"r{index}"]
            self.report(f"r{index}", *rollout._load(self.directive(f"r{index}")))


@pytest.fixture
def run():
    """Opens a run: `run(steps=2, …)`, options of `make_settings`."""

    def open_run(**options) -> Run:
        return Run(make_settings(**options))

    return open_run


@pytest.fixture
def make_sample():
    return sample


@pytest.fixture
def settings():
    return make_settings
