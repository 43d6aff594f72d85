"""The divergence from a reference as part of the reward of each decision.

Shape legend: n decisions of one sequence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from cosmos_algorithm_grpo.advantage import Whitening
from cosmos_algorithm_grpo.kl import kl_estimate
from cosmos_algorithm_grpo.objective import Objective
from cosmos_core.protocols import Estimate, Taken
from cosmos_core.types import Group

if TYPE_CHECKING:
    import torch


class ShapedObjective(Objective):
    """An objective whose decisions each lose reward by their divergence, and count what comes after them.

    The advantage of decision t is A_t = A - weight · Σ_{i ≥ t} k1_i, A being that of the sequence's reward above its
    baseline; with `scale = "batch"`, A_t is then whitened over all decisions of the batch.

    Source: 2501.03262, equations 8 to 10. Deviation: the divergence is that of `old_logprobs`; a baseline, if there is
    one, is of rewards alone.
    """

    def advantages(self, groups: Sequence[Group]) -> list[list[float | None]]:
        """Rewards above their baseline; what follows from the divergence is `estimate`'s."""
        return [self._advantages(group) for group in groups]

    def summarise(self, taken: Taken) -> Sequence[float]:
        """The number of decisions, the sum of their advantages and that of the squares."""
        values_n = self._values(taken)
        return [float(len(values_n)), float(values_n.sum()), float(values_n.square().sum())]

    def estimate(self, taken: Taken, batch: Mapping[int, Sequence[float]]) -> Estimate:
        """The advantage of each decision, and the sequence's mean divergence."""
        values_n = self._values(taken)
        if self._options.scale == "batch":
            # In the order of places, so that rounding is the same in every process.
            whiten = Whitening([batch[place] for place in sorted(batch)], eps=self._options.advantage_eps)
            values_n = (values_n - whiten.mean) * whiten.factor
        divergence = float(self._divergence(taken).mean()) if len(values_n) else 0.0
        return Estimate(advantages_n=values_n.float(), metrics={"reference_kl": divergence})

    def _values(self, taken: Taken) -> torch.Tensor:
        """The advantage of each decision before whitening, float64."""
        divergence_n = self._divergence(taken)
        onward_n = divergence_n.flip(0).cumsum(0).flip(0)
        return taken.advantage - self._options.kl_weight * onward_n

    def _divergence(self, taken: Taken) -> torch.Tensor:
        """k1 of each decision, float64."""
        assert taken.logprobs_n is not None
        return kl_estimate(taken.logprobs_n.double(), taken.frozen_n["reference"].double(), "k1")
