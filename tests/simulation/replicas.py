"""Replicas without weights, engines or sockets: they follow directives and keep the contract of both roles.

They share a `World`, which stands for the sample plane, the weight plane and the collectives. The "weights" of a step
are a hash of all that was trained on up to it, so whoever trains on something else ends with another digest.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable
from typing import Final

from cosmos_core.transport.directives import GenerationOrder, Lease, PolicyDirective, RolloutDirective, TrainOrder
from cosmos_core.transport.reports import (
    CheckpointSaved,
    GenerationFailed,
    GenerationFormed,
    GroupFailed,
    GroupFinished,
    HeldOutLoss,
    Left,
    Report,
    Slept,
    StepDone,
    StepFailed,
    WeightsLoaded,
    WeightsPublished,
    WeightsRejected,
)
from cosmos_core.types import Sample, SampleStatus

INITIAL_DIGEST: Final = "initial"

_FAILED_MEASUREMENTS: Final = 0.2
_IMPATIENCE: Final = 0.01
"""How often a rollout replica gives up on those that pass weights on to it."""
_LONG_ROWS: Final = 0.05
"""How often a held-out prompt cannot be completed."""
_CORRUPTIONS: Final = 0.1
"""How often weights do not arrive as they were published."""


def trained(digest: str, order: TrainOrder) -> str:
    """Digest of the weights that a step makes of those with `digest`."""
    # Another attempt at the same batch comes out with other numbers.
    content = repr((order.attempt, [(group.position, group.row, group.samples) for group in order.groups]))
    return hashlib.sha256(f"{digest}{content}".encode()).hexdigest()[:16]


class World:
    """What the fakes share.

    Attributes:
        group_size: Samples of each training group.
        payloads: Leases whose payloads can be fetched, by endpoint.
        snapshots: Digest of each version that can be loaded, by endpoint.
        policies: The policy replicas that live, by name.
        checkpoints: Digest of each saved step.
        heldout_rows: Held-out demonstrations.
        rng: Which held-out rows are unusable, and whose measurement fails; None measures all of them.
    """

    def __init__(self, *, group_size: int = 4, heldout_rows: int = 3, rng: random.Random | None = None) -> None:
        self.group_size: Final = group_size
        self.heldout_rows: Final = heldout_rows
        self.rng: Final = rng
        self.payloads: Final[dict[str, set[int]]] = {}
        self.snapshots: Final[dict[str, dict[int, str]]] = {}
        self.policies: Final[dict[str, FakePolicy]] = {}
        self.checkpoints: Final[dict[int, str]] = {}
        self._verdicts: Final[dict[tuple[int, int, int], tuple[int, ...]]] = {}

    def missing(self, order: TrainOrder, generation: int) -> tuple[int, ...]:
        """Leases of a batch that cannot be fetched; all members of the generation agree on one answer."""
        key = (order.step, order.attempt, generation)
        if key not in self._verdicts:
            self._verdicts[key] = tuple(
                group.lease
                for group in order.groups
                if group.endpoint and group.lease not in self.payloads.get(group.endpoint, ())
            )
        return self._verdicts[key]

    def measured(self, order: TrainOrder) -> tuple[HeldOutLoss, ...]:
        """What a member measures beside a step; that of the step's own result fails where a group breaks after it."""
        fails = self.rng is not None and self.rng.random() < _FAILED_MEASUREMENTS
        return tuple(self._loss(version) for version in order.measures if not (fails and version == order.step))

    def _loss(self, version: int) -> HeldOutLoss:
        unusable: list[int] = []
        if self.rng is not None:
            draw = random.Random(f"held-out rows of {self.heldout_rows}")
            unusable = sorted(draw.sample(range(self.heldout_rows), draw.randrange(self.heldout_rows)))
        num_rows = self.heldout_rows - len(unusable)
        return HeldOutLoss(
            version=version,
            loss=1.0 / (version + 1),
            num_units=3 * num_rows,
            num_rows=num_rows,
            dropped=tuple((row, "too_long") for row in unusable),
        )


class Sleeper:
    """What a replica does about turns.

    Attributes:
        is_awake: Whether it has the memory of its GPU.
    """

    def __init__(self) -> None:
        self.is_awake = False
        self._turn = -1

    def rest(self, directive: PolicyDirective | RolloutDirective) -> list[Report]:
        """Be asleep, and say so once a turn."""
        self.is_awake = False
        was_said, self._turn = self._turn == directive.turn, directive.turn
        return [] if was_said else [Slept(turn=directive.turn)]


class FakePolicy(Sleeper):
    """A policy replica: its weights are the digest of its training.

    Args:
        world: Shared with the others.
        name: Its name.
        incarnation: Its process.
        step: Step of the checkpoint that it starts from.
        rng: What goes wrong; None: nothing.
        break_rate: How often a generation is not formed, or a step not applied, as the group breaks.

    Attributes:
        has_left: Whether it has said that it leaves: its process may end.
    """

    def __init__(
        self,
        world: World,
        name: str,
        incarnation: str,
        step: int = 0,
        *,
        rng: random.Random | None = None,
        break_rate: float = 0.0,
    ) -> None:
        super().__init__()
        self.name: Final = name
        self.endpoints: Final = {"weights": f"weights/{incarnation}", "store": f"store/{incarnation}"}
        self.step = step
        self.digest = world.checkpoints[step] if step else INITIAL_DIGEST
        self.trained: Final[list[TrainOrder]] = []
        self._world: Final = world
        self._generation = 0
        self._tried: set[tuple[int, int, int]] = set()
        self._snapshots: Final[dict[int, str]] = world.snapshots.setdefault(self.endpoints["weights"], {})
        self._saved = step or -1
        self.has_left = False
        self._rng: Final = rng
        self._break_rate: Final = break_rate
        world.policies[name] = self

    def end(self) -> None:
        """Take everything it held out of the world."""
        self._world.snapshots.pop(self.endpoints["weights"], None)
        if self._world.policies.get(self.name) is self:
            del self._world.policies[self.name]

    def follow(self, directive: PolicyDirective) -> list[Report]:
        """Do what the directive asks and is not done; what there is to report."""
        if directive.leave:
            was_there, self.has_left = not self.has_left, True
            return [Left()] if was_there else []
        if directive.sleep:
            reports = self._publish_and_save(directive) if self.is_awake else []
            return reports + self.rest(directive)
        self.is_awake = True
        reports, order = [], directive.generation
        if order is not None and order.generation > self._generation:
            reports += self._form(order)
        reports += self._publish_and_save(directive)
        if directive.train is not None and order is not None and order.generation == self._generation:
            reports += self._train(directive.train, order)
        return reports

    def _publish_and_save(self, directive: PolicyDirective) -> list[Report]:
        reports: list[Report] = []
        if directive.checkpoint == self.step != self._saved:
            self._saved = self.step
            self._world.checkpoints[self.step] = self.digest
            path = f"checkpoints/step-{self.step}"
            reports.append(CheckpointSaved(step=self.step, path=path, generation=self._generation))
        if directive.publish == self.step and self.step not in self._snapshots:
            reports.append(self._publish())
        for version in [version for version in self._snapshots if version < directive.retain]:
            del self._snapshots[version]
        return reports

    def lacks(self, order: GenerationOrder) -> bool:
        """Whether it is to be sent the weights of a generation, and has not formed it."""
        return order.transfer and order.generation > self._generation and order.members[order.source] != self.name

    def still_holds(self, report: Report) -> bool:
        """Whether the weights that a report tells of are still those it has; its present group was told of once."""
        match report:
            case StepDone():
                return report.step == self.step
            case GenerationFormed():
                return report.step == self.step and report.generation < self._generation
            case _:
                return False

    def _form(self, order: GenerationOrder) -> list[Report]:
        if order.checkpoint and self.step != order.step:
            self.step, self.digest = order.step, self._world.checkpoints[order.step]
        source = self._world.policies.get(order.members[order.source])
        if order.transfer and source is not self:
            # The source sends once it has formed the generation; a process that replaced it never does.
            if source is None or source._generation != order.generation:
                return []
            self.step, self.digest = source.step, source.digest
        self._generation = order.generation
        if self._breaks():
            return [GenerationFailed(generation=order.generation, reason="a connection was reset")]
        return [GenerationFormed(generation=order.generation, step=self.step)]

    def _breaks(self) -> bool:
        return self._rng is not None and self._rng.random() < self._break_rate

    def _train(self, order: TrainOrder, generation: GenerationOrder) -> list[Report]:
        key = (order.step, order.attempt, generation.generation)
        if order.step != self.step + 1 or key in self._tried:
            return []
        self._tried.add(key)
        missing = self._world.missing(order, generation.generation)
        breaks = self._breaks()
        if missing or breaks:
            return [
                StepFailed(
                    step=order.step,
                    attempt=order.attempt,
                    generation=generation.generation,
                    missing=missing,
                    reason="payloads are gone" if missing else "a collective broke",
                )
            ]
        self.trained.append(order)
        self.step = order.step
        self.digest = trained(self.digest, order)
        rank = generation.members.index(self.name)
        done = StepDone(
            step=order.step,
            attempt=order.attempt,
            generation=generation.generation,
            skipped=False,
            metrics={} if rank else {"loss": 1.0 / order.step, "wait_s": 0.5},
            heldout=self._world.measured(order),
        )
        return [done, self._publish()] if order.publish else [done]

    def _publish(self) -> WeightsPublished:
        self._snapshots[self.step] = self.digest
        return WeightsPublished(version=self.step, digest=self.digest, nbytes=1)


class FakeRollout(Sleeper):
    """A rollout replica: rewards are a function of the row and the sample's index.

    Args:
        world: Shared with the others.
        incarnation: Its process.
        rng: How much it finishes at a time, and what goes wrong; None finishes everything, in order.
        drop_every: One prompt in so many is dropped by the algorithm, and one in seven times so many fails; 0: none.
        lie_rate: How often weights that it says it has loaded are others.

    Attributes:
        has_left: Whether it has said that it leaves: its process may end.
    """

    def __init__(
        self,
        world: World,
        incarnation: str,
        *,
        rng: random.Random | None = None,
        drop_every: int = 0,
        lie_rate: float = 0.0,
    ) -> None:
        super().__init__()
        self.endpoints: Final = {"payloads": f"payloads/{incarnation}"}
        self.version = -1
        self.has_left = False
        self.copies: Final = f"copies/{incarnation}"
        self._world: Final = world
        self._rng: Final = rng
        self._drop_every: Final = drop_every
        self._lie_rate: Final = lie_rate
        self._num_rollbacks = 0
        self._active: Final[dict[int, tuple[Lease, int]]] = {}
        self._done: Final[set[int]] = set()
        self._payloads: Final = world.payloads.setdefault(self.endpoints["payloads"], set())
        self._copies: Final[dict[int, str]] = world.snapshots.setdefault(self.copies, {})

    def end(self) -> None:
        """Take everything it held out of the world."""
        self._world.payloads.pop(self.endpoints["payloads"], None)
        self._world.snapshots.pop(self.copies, None)

    def follow(self, directive: RolloutDirective) -> list[Report]:
        """Do some of what the directive asks; what there is to report."""
        if directive.leave:
            was_there, self.has_left = not self.has_left, True
            return [Left()] if was_there else []
        for step in directive.rollbacks[self._num_rollbacks :]:
            if self.version > step:
                self.version = -1
        self._num_rollbacks = len(directive.rollbacks)
        reports: list[Report] = []
        if directive.sleep:
            self.version = -1
            reports += self.rest(directive)
        else:
            self.is_awake = True
            reports += self._load(directive)
        leased = {lease.lease for lease in directive.leases}
        self._payloads.intersection_update(leased.union(directive.hold))
        for number in [number for number in self._active if number not in leased]:
            del self._active[number]
        for lease in directive.leases:
            if lease.lease not in self._done and lease.lease not in self._active and self.version >= 0:
                self._active[lease.lease] = (lease, self.version)
        for number in self._pick(list(self._active)) if self.is_awake else ():
            reports.append(self._finish(*self._active.pop(number)))
        return reports

    def _load(self, directive: RolloutDirective) -> list[Report]:
        relaying = directive.relaying
        for version in [version for version in self._copies if version < relaying.retain]:
            del self._copies[version]
        target = directive.weights
        # Some time those who wait give up on the replicas above them.
        if relaying.reserve is not None and self._rng is not None and self._rng.random() < _IMPATIENCE:
            target = relaying.reserve
        if target is None or target.version <= self.version:
            return []
        for source in target.sources:
            if self._world.snapshots.get(source, {}).get(target.version) == target.digest:
                if self._rng is not None and self._rng.random() < _CORRUPTIONS:
                    self.version = -1
                    return [WeightsRejected(version=target.version, digest="wrong", expected=target.digest)]
                if self._rng is not None and self._rng.random() < self._lie_rate:
                    self.version = -1
                    return [self._loaded(target.version, "of other weights", source, endpoint="")]
                self.version = target.version
                if relaying.keep:
                    self._copies[target.version] = target.digest
                endpoint = self.copies if relaying.keep else ""
                return [self._loaded(target.version, target.digest, source, endpoint=endpoint)]
        return []

    def _loaded(self, version: int, digest: str, source: str, *, endpoint: str) -> WeightsLoaded:
        return WeightsLoaded(
            version=version,
            digest=digest,
            transfer_s=0.25,
            paused_s=0.125,
            nbytes=1,
            relayed=int(source.startswith("copies/")),
            endpoint=endpoint,
        )

    def _pick(self, numbers: list[int]) -> Iterable[int]:
        if self._rng is None:
            return numbers
        self._rng.shuffle(numbers)
        return numbers[: self._rng.randrange(4)]

    def _finish(self, lease: Lease, began: int) -> Report:
        self._done.add(lease.lease)
        every = self._drop_every if lease.purpose == "train" else 0
        if every and lease.position % (7 * every) == 1:
            return GroupFailed(lease=lease.lease, reason="too_long", detail="the prompt has 9 units")
        if lease.purpose == "evaluation" and self._rng is not None and self._rng.random() < _LONG_ROWS:
            return GroupFailed(lease=lease.lease, reason="too_long", detail="the held-out prompt has 9 units")
        number = self._world.group_size if lease.purpose == "train" else 1
        if lease.purpose == "train":
            self._payloads.add(lease.lease)
        samples = tuple(self._sample(lease, index, began) for index in range(number))
        dropped = "equal_rewards" if every and lease.position % every == 0 else ""
        text, number = f"row {lease.row}", len(self._done)
        times = {"busy_s": number / 2, "scoring_s": number, "awaited_s": 2.0**-8}
        return GroupFinished(lease=lease.lease, samples=samples, drop=dropped, text=text, **times)

    def _sample(self, lease: Lease, index: int, began: int) -> Sample:
        draw = random.Random(f"{lease.purpose}/{lease.row}/{index}").random()
        failed = draw < 0.05
        reward = None if failed else float(draw > 0.4)
        return Sample(
            index=index,
            status=SampleStatus.REWARD_FAILED if failed else SampleStatus.TRUNCATED if draw > 0.9 else SampleStatus.OK,
            reward=reward,
            rewards={} if reward is None else {"right": reward},
            oldest_version=began,
            newest_version=self.version,
            num_units=1 + int(draw * 20),
            num_prompt_units=5,
            detail="ValueError: no number" if failed else "",
        )
