"""The loss of a micro-batch, weighed so that a step does not depend on how its batch was split.

Each decision's weight is its part of an average over the whole batch of all replicas, so weighted sums of
micro-batches, ranks and replicas add up to the batch's loss, and their gradients to its gradient.

Shape legend: N decisions of a micro-batch, S its sequences.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

import attrs
import numpy as np
import torch

from cosmos_core.policy.batches.batch import Counts, TrainSequence
from cosmos_core.policy.batches.spans import Piece, pieces
from cosmos_core.protocols import (
    Aggregation,
    Algorithm,
    Decided,
    Decisions,
    Estimate,
    FrozenOutput,
    FrozenRole,
    Imitating,
    Loss,
    MicroBatch,
)
from cosmos_core.types import Payload

CPU: Final = torch.device("cpu")
NUMPY_NAMES: Final = {"float32": np.float32, "int32": np.int32}


@attrs.frozen(kw_only=True, eq=False)
class Known:
    """What is known of a micro-batch's decisions before its forward.

    Attributes:
        behaviour_logprobs_N: float32; zeros for demonstrations.
        versions_N: int32, weight version that made each; -1 for demonstrations.
        advantages_N: float32.
        sequence_N: int64 in [0, S).
        weights_N: float32, each decision's part of the batch's average.
        num_sequences: S.
        has_behaviour: Whether an engine recorded log-probs of probabilities: demonstrations have none, and those of
            regressions are squared errors.
        targets_N: float32, what an algorithm that estimates wants of each decision; None where it wants nothing.
    """

    behaviour_logprobs_N: torch.Tensor
    versions_N: torch.Tensor
    advantages_N: torch.Tensor
    sequence_N: torch.Tensor
    weights_N: torch.Tensor
    num_sequences: int
    has_behaviour: bool
    targets_N: torch.Tensor | None = None

    def settled(self, estimates: Sequence[Estimate]) -> Known:
        """The same with what the algorithm made of each sequence, cut to the decisions that are here."""
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


def know(
    algorithm: Algorithm,
    batch: MicroBatch,
    sequences: Sequence[TrainSequence],
    totals: Counts,
    device: torch.device = CPU,
) -> Known:
    """Lay out what is known of a micro-batch's decisions."""
    members = [(sequences[piece.sequence], piece) for piece in pieces(batch)]
    numbers = np.asarray(batch.num_decisions)
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
        has_behaviour=any(_has_behaviour(member.payload) for member, _ in members),
    ).on(device)


def price(
    algorithm: Algorithm,
    decided: Decided,
    known: Known,
    old_logprobs_N: torch.Tensor | None,
    frozen: Mapping[FrozenRole, FrozenOutput] = MappingProxyType({}),
) -> Loss:
    """The algorithm's loss of each decision."""
    return algorithm.loss(_decisions(decided, known, old_logprobs_N, frozen))


def price_imitation(algorithm: Imitating, decided: Decided, known: Known) -> Loss:
    """Its loss of each decision of demonstrations that are imitated beside rollouts."""
    return algorithm.imitation(_decisions(decided, known, None, {}))


def _decisions(
    decided: Decided, known: Known, old_logprobs_N: torch.Tensor | None, frozen: Mapping[FrozenRole, FrozenOutput]
) -> Decisions:
    return Decisions(
        logprobs_N=decided.logprobs_N,
        behaviour_logprobs_N=known.behaviour_logprobs_N,
        old_logprobs_N=old_logprobs_N,
        entropy_N=decided.entropy_N,
        advantages_N=known.advantages_N,
        sequence_N=known.sequence_N,
        num_sequences=known.num_sequences,
        frozen=frozen,
        targets_N=known.targets_N,
        values_N=decided.values_N,
    )


def _has_behaviour(payload: Payload) -> bool:
    return "logprobs" in payload.arrays and "noise_seed" not in payload.arrays


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
