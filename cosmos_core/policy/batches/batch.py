"""The sequences of a step that this replica trains on, each with its advantage.

Counts are of everything that the objective averages over: a sequence that is skipped because its advantage is 0, and
so has no gradient, still counts.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Mapping, Sequence

import attrs
import numpy as np

from cosmos_core.errors import DataError, TransportError
from cosmos_core.models.tokens import decided
from cosmos_core.protocols import Algorithm
from cosmos_core.protocols.algorithm import TurnTaken
from cosmos_core.transport.directives import GroupRef
from cosmos_core.types import Group, Payload, Sample


@attrs.frozen(kw_only=True)
class Units:
    """The numbers of units of one payload.

    Attributes:
        decisions: Tokens that were decided, or denoising steps.
        conditioning: Tokens of the prompt; what latents are conditioned on is no unit.
        others: Tokens of the completion that nobody decided.
    """

    decisions: int
    conditioning: int
    others: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return self.decisions + self.conditioning + self.others


def units_of(payload: Payload) -> Units:
    """The units of a payload of tokens or latents.

    Raises:
        DataError: It is of another kind, or its arrays do not say.
    """
    match payload.kind:
        case "tokens":
            prompt, completion = _length(payload, "prompt"), _length(payload, "completion")
            number = int(decided(payload).sum())
            return Units(decisions=number, conditioning=prompt, others=completion - number)
        case "latents":
            return Units(decisions=_length(payload, "times"), conditioning=0)
    raise DataError(f"a payload of kind {payload.kind!r} has no decisions; the policy trains on tokens or latents")


def turns_of(payload: Payload) -> tuple[TurnTaken, ...]:
    """The turns of a dialogue; empty where the payload has one.

    Raises:
        DataError: They are not those of its decisions.
    """
    told = [payload.arrays.get(name) for name in ("turns", "turn_rewards")]
    if not any(told):
        return ()
    sizes, rewards = (np.frombuffer(each.data, each.dtype) if each else np.empty(0) for each in told)
    number = _length(payload, "logprobs")
    if rewards.shape != sizes.shape or sizes.sum() != number:
        raise DataError(f"turns of {sizes.tolist()} decisions, with {rewards.size} rewards, of a payload of {number}")
    found = zip(sizes.tolist(), rewards.tolist(), strict=True)
    return tuple(TurnTaken(num_decisions=size, reward=reward) for size, reward in found)


def _length(payload: Payload, name: str) -> int:
    array = payload.arrays.get(name)
    if array is None or len(array.shape) != 1:
        found = "none" if array is None else f"one of shape {array.shape}"
        raise DataError(f"a payload of kind {payload.kind!r} needs a flat array {name!r}, and has {found}")
    return array.shape[0]


class MissingPayloadsError(TransportError):
    """Payloads of a share could not be had.

    Args:
        leases: Those that are missing.
        reason: Why.
    """

    def __init__(self, leases: Iterable[int], reason: str) -> None:
        super().__init__(reason)
        self.leases = tuple(leases)


@attrs.frozen(kw_only=True)
class Counts:
    """Counts of a share, or of a whole batch.

    Attributes:
        sequences: Sequences that the objective averages over.
        decisions: Their decisions.
        prompt_units: Their conditioning units.
        trained: Sequences that go through the model; the others have an advantage of 0.
    """

    sequences: int = 0
    decisions: int = 0
    prompt_units: int = 0
    trained: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            sequences=self.sequences + other.sequences,
            decisions=self.decisions + other.decisions,
            prompt_units=self.prompt_units + other.prompt_units,
            trained=self.trained + other.trained,
        )


@attrs.frozen(kw_only=True, eq=False)
class TrainSequence:
    """One sequence to train on.

    Attributes:
        payload: The sequence.
        advantage: What the algorithm gave it.
        place: In the step's whole batch, of all replicas.
        temperature: At which its decisions were taken; None: that of the stage.
    """

    payload: Payload
    advantage: float
    place: int = 0
    temperature: float | None = None


@attrs.frozen(kw_only=True, eq=False)
class Share:
    """The sequences that one replica trains on in one step.

    Attributes:
        sequences: Those that go through the model in this process (all of them in a replica of one process).
        counts: Of the replica's share.
        filler: A sequence to keep step with, where this process has none and others of its replica have some.
        dropped: Demonstrations that cannot be used: (position, reason).
        details: Of each of these reasons, what is wrong with one of them.
        temperatures: Those of the whole batch, of all replicas, in an order that is the same in every process.
        imitated: Demonstrations to imitate beside rollouts; None where the algorithm imitates none.
        batch: The samples of the whole batch, of all replicas, that have an advantage.
    """

    sequences: tuple[TrainSequence, ...]
    counts: Counts
    filler: TrainSequence | None = None
    dropped: tuple[tuple[int, str], ...] = ()
    details: Mapping[str, str] = attrs.field(factory=dict)
    temperatures: tuple[float | None, ...] = (None,)
    imitated: Share | None = None
    batch: tuple[Wanted, ...] = ()


@attrs.frozen(kw_only=True)
class Wanted:
    """A sample of this replica's share with its advantage.

    Attributes:
        group: Its group.
        index: Its own among the group's samples.
        place: Its own among all samples of the batch.
        advantage: What the algorithm gave it.
    """

    group: GroupRef
    index: int
    place: int
    advantage: float

    @property
    def sample(self) -> Sample:
        """The sample, as the control plane knows it."""
        return self.group.samples[self.index]


def temperature_of(reference: GroupRef) -> float | None:
    """The temperature that a group was drawn at; None where it is that of the recipe."""
    value = reference.settings.get("rollout.sampling.temperature")
    return None if value is None else float(value)


def temperatures(groups: Iterable[GroupRef]) -> tuple[float | None, ...]:
    """The temperatures of a batch, each once; the recipe's first."""
    found = {temperature_of(group) for group in groups}
    known = sorted(value for value in found if value is not None)
    return (None, *known) if None in found or not known else tuple(known)


def group_of(reference: GroupRef) -> Group:
    """The group as algorithms know it."""
    return Group(position=reference.position, samples=reference.samples)


def wanted_samples(algorithm: Algorithm, groups: Sequence[GroupRef], share: Sequence[int]) -> list[Wanted]:
    """The samples of a share that the algorithm gave an advantage, computed from the whole batch."""
    advantages = algorithm.advantages([group_of(group) for group in groups])
    first = list(itertools.accumulate((len(group.samples) for group in groups), initial=0))
    return [
        Wanted(group=groups[number], index=index, place=first[number] + index, advantage=advantage)
        for number in share
        for index, advantage in enumerate(advantages[number])
        if advantage is not None
    ]


def needed(algorithm: Algorithm, wanted: Sequence[Wanted]) -> list[Wanted]:
    """The samples whose forward is needed."""
    return [item for item in wanted if item.advantage != 0.0 or not algorithm.skips_zero_advantage]


def requests(wanted: Sequence[Wanted]) -> dict[str, list[int]]:
    """Leases to fetch, by endpoint."""
    by_endpoint: dict[str, list[int]] = {}
    for item in wanted:
        leases = by_endpoint.setdefault(item.group.endpoint, [])
        if item.group.lease not in leases:
            leases.append(item.group.lease)
    return by_endpoint


def counts_of(wanted: Sequence[Wanted], trained: Sequence[Wanted]) -> Counts:
    """Counts of a share of finished groups."""
    return Counts(
        sequences=len(wanted),
        decisions=sum(item.sample.num_units for item in wanted),
        prompt_units=sum(item.sample.num_prompt_units for item in wanted),
        trained=len(trained),
    )


def rollout_sequences(
    trained: Sequence[Wanted], payloads: Mapping[int, Sequence[Payload]]
) -> tuple[TrainSequence, ...]:
    """Sequences of finished groups, with the payloads that were fetched.

    Raises:
        MissingPayloadsError: A lease is absent, or what lies under it is not what was reported.
    """
    missing = sorted({item.group.lease for item in trained if not _is_held(item, payloads)})
    if missing:
        raise MissingPayloadsError(missing, f"the payloads of {len(missing)} leases are gone or not as reported")
    return tuple(
        TrainSequence(
            payload=payloads[item.group.lease][item.index],
            advantage=item.advantage,
            place=item.place,
            temperature=temperature_of(item.group),
        )
        for item in trained
    )


def _is_held(item: Wanted, payloads: Mapping[int, Sequence[Payload]]) -> bool:
    """True if a sample's payload is there, with one recorded value for each decision that was reported."""
    held = payloads.get(item.group.lease, ())
    if len(held) != len(item.group.samples):
        return False
    payload, number = held[item.index], item.sample.num_units
    recorded = [payload.arrays.get(name) for name in ("logprobs", "versions")]
    if any(array is None or array.shape != (number,) for array in recorded):
        return False
    try:
        turns_of(payload)
        return units_of(payload).decisions == number
    except DataError:
        return False


def balanced(lengths: Sequence[int], shares: int) -> list[tuple[int, ...]]:
    """Indices of `lengths` for each share: longest first, each to the share with the fewest units so far.

    Deterministic, so that every process works it out for itself. The fullest share has at most one sequence more than
    the emptiest needs (Graham, 1969: within 4/3 of the best possible).
    """
    totals = [(0, share) for share in range(shares)]
    members: list[list[int]] = [[] for _ in range(shares)]
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        total, share = heapq.heappop(totals)
        members[share].append(index)
        heapq.heappush(totals, (total + lengths[index], share))
    return [tuple(sorted(indices)) for indices in members]
