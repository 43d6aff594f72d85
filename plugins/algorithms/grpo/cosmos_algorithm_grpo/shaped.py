"""The divergence from a reference as part of the reward of each decision.

Shape legend: n decisions of one sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from cosmos_algorithm_grpo.advantage import Whitening
from cosmos_algorithm_grpo.kl import kl_estimate
from cosmos_algorithm_grpo.objective import Objective
from cosmos_core.protocols.algorithm import Estimate, Taken
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
        """Rewards above their baseline; what follows from the divergence is `settle`'s."""
        return [self._advantages(group) for group in groups]

    def summarise(self, taken: Taken) -> Sequence[float]:
        """The number of decisions, the sum of their advantages and that of the squares."""
        values_n = self._values(taken)
        return [float(len(values_n)), float(values_n.sum()), float(values_n.square().sum())]

    def settle(self, batch: Mapping[int, Sequence[float]]) -> Callable[[Taken], Estimate]:
        """The advantage of each decision, whitened if the options say so, and the sequence's mean divergence."""
        whiten = None
        if self._options.scale == "batch":
            whiten = Whitening([*batch.values()], eps=self._options.advantage_eps)

        def estimate(taken: Taken) -> Estimate:
            values_n = self._values(taken)
            if whiten is not None:
                values_n = (values_n - whiten.mean) * whiten.factor
            divergence = float(self._divergence(taken).mean()) if len(values_n) else 0.0
            return Estimate(advantages_n=values_n.float(), metrics={"reference_kl": divergence})

        return estimate

    def _values(self, taken: Taken) -> torch.Tensor:
        """The advantage of each decision before whitening, float64."""
        divergence_n = self._divergence(taken)
        onward_n = divergence_n.flip(0).cumsum(0).flip(0)
        return taken.advantage - self._options.kl_weight * onward_n

    def _divergence(self, taken: Taken) -> torch.Tensor:
        """k1 of each decision, float64."""
        assert taken.logprobs_n is not None
        return kl_estimate(taken.logprobs_n.double(), taken.frozen_n["reference"].double(), "k1")
