"""Packs a process's sequences into micro-batches, and lays out their decisions as algorithms price them.

Each decision's weight is its part of an average over the whole batch of all replicas, so weighted sums of
micro-batches, ranks and replicas add up to the batch's loss, and their gradients to its gradient: a step does not
depend on how its batch was split.

Shape legend: N decisions of a micro-batch, n of one sequence, S sequences of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Final, TypedDict, TypeVar

import attrs
import numpy as np
import torch

from cosmos_core.config.schema import PolicyConfig
from cosmos_core.models.documents import pack_samples
from cosmos_core.policy.batches.batch import Counts, Share, TrainSequence
from cosmos_core.policy.processes.world import World
from cosmos_core.protocols import Aggregation, Algorithm, Decided, Decisions, MicroBatch, Model
from cosmos_core.protocols.algorithm import Estimate
from cosmos_core.protocols.frozen import FrozenOutput, FrozenRole
from cosmos_core.protocols.model import Span
from cosmos_core.types import Payload

Whole = TypeVar("Whole", torch.Tensor, range)


@attrs.frozen(kw_only=True)
class Piece:
    """Decisions of one sequence in one micro-batch.

    Attributes:
        sequence: Index of the sequence, among what was packed.
        number: How many decisions.
        span: Which of the sequence's.
    """

    sequence: int
    number: int
    span: Span

    def of(self, whole_n: Whole) -> Whole:
        """The piece's part of what there is for each decision of the sequence."""
        return whole_n[self.span.first : self.span.first + self.number]


def pieces(batch: MicroBatch) -> Iterator[Piece]:
    """The piece of each sequence in a micro-batch, in its order."""
    spans = batch.spans or tuple(Span(first=0, total=number) for number in batch.num_decisions)
    for sequence, number, span in zip(batch.sequences, batch.num_decisions, spans, strict=True):
        yield Piece(sequence=sequence, number=number, span=span)


CPU: Final = torch.device("cpu")
NUMPY_NAMES: Final = {"float32": np.float32, "int32": np.int32}


@attrs.frozen(kw_only=True, eq=False)
class Known:
    """A micro-batch's decisions, as they are known before its forward.

    Attributes:
        behaviour_logprobs_N: float32; zeros for demonstrations.
        versions_N: int32, weight version that made each; -1 for demonstrations.
        advantages_N: float32.
        sequence_N: int64 in [0, S).
        weights_N: float32, each decision's part of the batch's average.
        num_sequences: S.
        has_behaviour: Whether an engine recorded log-probs of probabilities: demonstrations have none, and those of
            regressions are squared errors.
        targets_N: float32, the target of each decision, of an algorithm that estimates; None where it gives none.
    """

    behaviour_logprobs_N: torch.Tensor
    versions_N: torch.Tensor
    advantages_N: torch.Tensor
    sequence_N: torch.Tensor
    weights_N: torch.Tensor
    num_sequences: int
    has_behaviour: bool
    targets_N: torch.Tensor | None = None

    def decisions(
        self,
        decided: Decided,
        old_logprobs_N: torch.Tensor | None = None,
        frozen: Mapping[FrozenRole, FrozenOutput] = MappingProxyType({}),
    ) -> Decisions:
        """The decisions, as an algorithm prices them."""
        return Decisions(
            logprobs_N=decided.logprobs_N,
            behaviour_logprobs_N=self.behaviour_logprobs_N,
            old_logprobs_N=old_logprobs_N,
            entropy_N=decided.entropy_N,
            advantages_N=self.advantages_N,
            sequence_N=self.sequence_N,
            num_sequences=self.num_sequences,
            frozen=frozen,
            targets_N=self.targets_N,
            values_N=decided.values_N,
        )

    def settled(self, estimates: Sequence[Estimate]) -> Known:
        """The same with the algorithm's estimates of the sequences, cut to the decisions that are here."""
        targets = [each.targets_n for each in estimates if each.targets_n is not None]
        return attrs.evolve(
            self,
            advantages_N=torch.cat([each.advantages_n for each in estimates]).detach(),
            targets_N=torch.cat(targets).detach() if targets else None,
        )

    def on(self, device: torch.device) -> Known:
        """The same on a device."""
        return attrs.evolve(
            self,
            behaviour_logprobs_N=self.behaviour_logprobs_N.to(device),
            versions_N=self.versions_N.to(device),
            advantages_N=self.advantages_N.to(device),
            sequence_N=self.sequence_N.to(device),
            weights_N=self.weights_N.to(device),
        )


def decision_weights(
    aggregation: Aggregation, constant_length: int, num_decisions: Sequence[int], totals: Counts
) -> list[float]:
    """The weight of each decision of each sequence, in the order of `num_decisions`.

    Args:
        aggregation: The average.
        constant_length: The constant of `SEQUENCE_MEAN_TOKEN_SUM`.
        num_decisions: Decisions of each sequence, wherever they lie.
        totals: Counts of the whole batch, all replicas.
    """
    match aggregation:
        case Aggregation.TOKEN_MEAN:
            return [1.0 / max(totals.decisions, 1) for _ in num_decisions]
        case Aggregation.SEQUENCE_MEAN_TOKEN_MEAN:
            return [1.0 / (totals.sequences * max(number, 1)) for number in num_decisions]
        case Aggregation.SEQUENCE_MEAN_TOKEN_SUM:
            return [1.0 / (totals.sequences * constant_length) for _ in num_decisions]


def know(algorithm: Algorithm, batch: MicroBatch, sequences: Sequence[TrainSequence], totals: Counts) -> Known:
    """Lay out a micro-batch's decisions."""
    members = [(sequences[piece.sequence], piece) for piece in pieces(batch)]
    numbers = np.asarray(batch.num_decisions)
    held = [member.payload.arrays for member, _ in members]
    totals_of = [piece.span.total for _, piece in members]
    weights = decision_weights(algorithm.aggregation, algorithm.constant_length, totals_of, totals)

    def each(values: Sequence[float]) -> torch.Tensor:
        return torch.from_numpy(np.repeat(np.asarray(values, dtype=np.float32), numbers))

    return Known(
        behaviour_logprobs_N=_recorded(members, "logprobs", 0.0, "float32"),
        versions_N=_recorded(members, "versions", -1, "int32"),
        advantages_N=each([member.advantage for member, _ in members]),
        sequence_N=torch.from_numpy(np.repeat(np.arange(len(members)), numbers)),
        weights_N=each(weights),
        num_sequences=len(members),
        has_behaviour=any("logprobs" in each and "noise_seed" not in each for each in held),
    )


def _recorded(members: Sequence[tuple[TrainSequence, Piece]], name: str, absent: float, dtype: str) -> torch.Tensor:
    parts = [_array(member.payload, piece, name, absent, dtype) for member, piece in members]
    return torch.from_numpy(np.concatenate(parts))


def _array(payload: Payload, piece: Piece, name: str, absent: float, dtype: str) -> np.ndarray:
    array = payload.arrays.get(name)
    if array is None:
        return np.full(piece.number, absent, dtype=NUMPY_NAMES[dtype])
    values = np.frombuffer(array.data, dtype=NUMPY_NAMES[dtype])
    assert len(values) == piece.span.total, f"{name}: {len(values)} values for {piece.span.total} decisions"
    return values[piece.span.first :][: piece.number]


class Packing(TypedDict):
    """Arguments of `Model.pack`."""

    budget: int
    multiple: int
    is_uniform: bool


@attrs.frozen(kw_only=True, eq=False)
class Prepared:
    """Micro-batches of a step whose decisions were taken at one temperature.

    Attributes:
        batches: As many as every other process of the replica has; those after `num_real` only keep step.
        sequences: What `MicroBatch.sequences` counts.
        known: What is known of the real ones before their forward, on the training device.
        weights: Weights of the decisions of the real ones, on the CPU.
        num_real: Those that count.
        temperature: At which their decisions were taken.
    """

    batches: Sequence[MicroBatch]
    sequences: Sequence[TrainSequence]
    known: Sequence[Known]
    weights: Sequence[torch.Tensor]
    num_real: int
    temperature: float

    @property
    def num_units(self) -> int:
        """Units of those that count."""
        return sum(batch.num_units for batch in self.batches[: self.num_real])

    def weighed(self) -> list[MicroBatch]:
        """All micro-batches, those that count with the weights of their decisions."""
        real = [
            attrs.evolve(batch, weights_N=weights_N)
            for batch, weights_N in zip(self.batches, self.weights, strict=False)
        ]
        return [*real, *self.batches[self.num_real :]]


@attrs.frozen(kw_only=True, eq=False)
class Packer:
    """Packs what the processes of a replica have; all of them call it together.

    Attributes:
        model: Knows how large a sequence is.
        policy: The budget.
        world: The processes of the replica.
        device: Where what is known is needed.
    """

    model: Model
    policy: PolicyConfig
    world: World
    device: torch.device

    @property
    def packing(self) -> Packing:
        """The arguments of `Model.pack`."""
        mesh = self.world.mesh
        return Packing(
            budget=self.policy.micro_batch_units,
            multiple=mesh.size("cp") * mesh.size("tp"),
            is_uniform=mesh.size("pp") > 1,
        )

    def pack(
        self, share: Share, chosen: Sequence[TrainSequence]
    ) -> tuple[list[MicroBatch], Sequence[TrainSequence], int]:
        """Pack, and bring every process to the same number of micro-batches: they meet in each forward.

        Args:
            share: Of this process; whatever it has can keep step.
            chosen: The sequences of it to pack.

        Returns:
            The micro-batches, the sequences in them, and how many of them, the first, are real.
        """
        sequences = chosen or share.sequences[:1] or tuple(filter(None, [share.filler]))
        batches = pack_samples(self.model, [sequence.payload for sequence in sequences], **self.packing)
        num_real = len(batches) if chosen else 0
        number = self.world.most(len(batches))
        if number > len(batches):
            batches += [min(batches, key=lambda batch: batch.num_units)] * (number - len(batches))
        return batches, sequences, num_real

    def prepare(
        self, share: Share, totals: Counts, algorithm: Algorithm, *, temperature: float | None, default: float
    ) -> Prepared:
        """Pack what was drawn at one temperature, which goes through the model apart from the rest, on every process.

        Args:
            share: Of this process.
            totals: Counts of everything that its loss is an average over.
            algorithm: Weighs it.
            temperature: Of the sequences to prepare, as these say.
            default: What it is where they say nothing.
        """
        drawn = tuple(sequence for sequence in share.sequences if sequence.temperature == temperature)
        batches, packed, num_real = self.pack(share, drawn)
        known = [know(algorithm, batch, drawn, totals) for batch in batches[:num_real]]
        return Prepared(
            batches=batches,
            sequences=packed,
            known=[each.on(self.device) for each in known],
            weights=[each.weights_N for each in known],
            num_real=num_real,
            temperature=default if temperature is None else temperature,
        )
