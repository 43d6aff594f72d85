"""A simulated replica's side of the protocol: it takes no time for anything, and nothing gets lost."""

from __future__ import annotations

from cosmos_core.transport.directives import Lease, PolicyDirective, RolloutDirective
from cosmos_core.transport.messages import DOWN, UP, WIRE_VERSION, Beat, Directive, Hello, Reports, Welcome
from cosmos_core.transport.reports import (
    REPORT,
    GenerationFormed,
    GroupFinished,
    Report,
    StepDone,
    WeightsLoaded,
    WeightsPublished,
)
from cosmos_core.types import Sample, SampleStatus

POLICY = "policy-0"
BATCH = 8
"""Results of one message."""


class Replica:
    """One of them, by its name."""

    def __init__(self, name: str, group_size: int) -> None:
        self.name = name
        self.leases: list[Lease] = []
        self.term = 0
        self._sequence = 0
        self._revision = 0
        self._step = 0
        self._newest_lease = 0
        self.samples = tuple(_sample(index) for index in range(group_size))

    def hello(self) -> bytes:
        """Ask to join; four are on a host, and eight hosts in a rack."""
        host = 0 if self.name == POLICY else 1 + int(self.name.rpartition("-")[2]) // 4
        return UP.encode(
            Hello(
                wire=WIRE_VERSION,
                run_id="run",
                name=self.name,
                role="policy" if self.name == POLICY else "rollout",
                incarnation=self.name,
                host=f"host-{host}",
                rack=f"rack-{host // 8}",
                pid=1,
                step=0,
                endpoints={"weights": f"weights/{self.name}", "payloads": f"payloads/{self.name}", "store": "store"},
            )
        )

    def beat(self) -> bytes:
        """Still here."""
        beat = Beat(name=self.name, incarnation=self.name, term=self.term, revision=self._revision, gauges={})
        return UP.encode(beat)

    def reports(self, *reports: Report) -> bytes:
        """Something to tell."""
        first = self._sequence + 1
        self._sequence += len(reports)
        encoded = tuple(REPORT.encode(report) for report in reports)
        return UP.encode(Reports(name=self.name, incarnation=self.name, term=self.term, first=first, reports=encoded))

    def results(self) -> bytes:
        """Eight leases are finished."""
        done, self.leases = self.leases[:BATCH], self.leases[BATCH:]
        return self.reports(*(GroupFinished(lease=lease.lease, samples=self.samples) for lease in done))

    def hear(self, data: bytes) -> list[bytes]:
        """What the controller says; what there is to answer at once."""
        message = DOWN.decode(data)
        if isinstance(message, Welcome):
            self.term = message.term
        if not isinstance(message, Directive) or message.revision <= self._revision or not self.term:
            return []
        self._revision = message.revision
        if message.rollout is not None:
            return self._roll_out(message.rollout)
        return self._train(message.policy) if message.policy is not None else []

    def _roll_out(self, directive: RolloutDirective) -> list[bytes]:
        fresh = [lease for lease in directive.leases if lease.lease > self._newest_lease]
        self.leases += fresh
        self._newest_lease = max((lease.lease for lease in fresh), default=self._newest_lease)
        if directive.weights is None or self._step:
            return []
        self._step = 1
        endpoint = f"copies/{self.name}" if directive.relaying.keep else ""
        loaded = WeightsLoaded(version=0, digest="d", transfer_s=0, paused_s=0, nbytes=1, endpoint=endpoint)
        return [self.reports(loaded)]

    def _train(self, directive: PolicyDirective) -> list[bytes]:
        order, generation = directive.train, directive.generation
        if generation is not None and not self._step:
            self._step = 1
            formed = GenerationFormed(generation=generation.generation, step=0)
            return [self.reports(formed, WeightsPublished(version=0, digest="d", nbytes=1))]
        if order is None or order.step < self._step:
            return []
        self._step = order.step + 1
        metrics = {"loss": 1.0}
        return [
            self.reports(StepDone(step=order.step, attempt=order.attempt, generation=1, skipped=False, metrics=metrics))
        ]


def _sample(index: int) -> Sample:
    return Sample(
        index=index,
        status=SampleStatus.OK,
        reward=1.0,
        rewards={"right": 1.0},
        oldest_version=0,
        newest_version=0,
        num_units=100,
        num_prompt_units=50,
    )
