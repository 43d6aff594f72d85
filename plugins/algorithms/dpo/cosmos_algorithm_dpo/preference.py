"""The base of objectives over pairs: the pair's margin, and the gradient of a loss of it.

A pair's loss depends on both of its sequences, which may lie in different micro-batches, processes and replicas. Its
derivative by each sequence's log-probability is known before the forward, since a batch is trained on once: from the
log-probs under the step's starting weights. Each decision then costs minus that derivative times its log-prob.

Source: 2305.18290 (DPO), section 4.

Shape legend: N decisions of a micro-batch, n of one sequence.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

import attrs

from cosmos_core.protocols import Aggregation, Decisions, Loss, PlainAlgorithm
from cosmos_core.protocols.algorithm import Estimate, Taken
from cosmos_core.protocols.frozen import FrozenRole
from cosmos_core.types import Group

if TYPE_CHECKING:
    import torch


@attrs.frozen(kw_only=True)
class Margin:
    """Log-ratios of policy to reference, log π(y) - log π_ref(y), summed over a sequence.

    Attributes:
        chosen: Of the pair's preferred completion.
        rejected: Of the other.
        mean: Of all sequences of the batch.
    """

    chosen: float
    rejected: float
    mean: float


@attrs.frozen(kw_only=True)
class Slope:
    """A pair's loss and its derivatives.

    Attributes:
        loss: Of the pair.
        chosen: By the preferred completion's log-ratio.
        rejected: By the other's.
    """

    loss: float
    chosen: float
    rejected: float


Shape: TypeAlias = Callable[[Margin], Slope]


class PreferenceObjective(PlainAlgorithm):
    """An objective over pairs (see `cosmos_core.protocols.algorithm.AdvantageEstimator`).

    Args:
        shape: The loss of a pair by its margin.
        beta: Factor of log-ratios in the rewards that are reported.
    """

    aggregation = Aggregation.SEQUENCE_MEAN_TOKEN_SUM
    # Margins follow from those of the starting weights.
    old_logprobs = "recompute"
    consults: Mapping[FrozenRole, None] = {"reference": None}

    def __init__(self, shape: Shape, beta: float) -> None:
        self._shape = shape
        self._beta = beta

    def advantages(self, groups: Sequence[Group]) -> list[list[float | None]]:
        """None for every sample: preferences have no rewards."""
        return [[None] * len(group.samples) for group in groups]

    def summarise(self, taken: Taken) -> Sequence[float]:
        """The log-ratio of the sequence, in float64."""
        assert taken.logprobs_n is not None
        return [float((taken.logprobs_n.double() - taken.frozen_n["reference"].double()).sum())]

    def settle(self, batch: Mapping[int, Sequence[float]]) -> Callable[[Taken], Estimate]:
        """The mean of all log-ratios, and what follows for the sequences of each pair."""
        ratios = {place: ratio for place, (ratio,) in batch.items()}
        return functools.partial(self._estimate, ratios, sum(ratios.values()) / len(ratios))

    def _estimate(self, ratios: Mapping[int, float], mean: float, taken: Taken) -> Estimate:
        """Minus the pair's derivative at each decision, and this sequence's part of its loss."""
        assert taken.logprobs_n is not None
        is_chosen = taken.advantage > 0.0
        own, other = ratios[taken.place], ratios[taken.place ^ 1]
        chosen, rejected = (own, other) if is_chosen else (other, own)
        slope = self._shape(Margin(chosen=chosen, rejected=rejected, mean=mean))
        # A pair is two sequences of the mean, and one of the loss.
        derivative = 2.0 * (slope.chosen if is_chosen else slope.rejected)
        return Estimate(
            advantages_n=taken.logprobs_n.new_full(taken.logprobs_n.shape, -derivative),
            targets_n=taken.logprobs_n.new_full(taken.logprobs_n.shape, slope.loss / max(len(taken.logprobs_n), 1)),
            metrics={
                "preference_accuracy": 0.5 if chosen == rejected else float(chosen > rejected),
                "preference_margin": self._beta * (chosen - rejected),
                "chosen_reward" if is_chosen else "rejected_reward": self._beta * own,
            },
        )

    def loss(self, decisions: Decisions) -> Loss:
        """The derivative times the log-prob, with the value of the pair's loss."""
        assert decisions.targets_N is not None
        moved_N: torch.Tensor = decisions.logprobs_N - decisions.logprobs_N.detach()
        return Loss(loss_N=decisions.targets_N - decisions.advantages_N * moved_N)
