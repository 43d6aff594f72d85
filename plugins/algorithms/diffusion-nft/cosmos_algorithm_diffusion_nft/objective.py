"""DiffusionNFT's prices.

Tensors' own methods are used, so that importing it imports no torch.

Shape legend: N decisions of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from cosmos_algorithm_diffusion_nft.options import DiffusionNftOptions
from cosmos_core.errors import ConfigError
from cosmos_core.protocols import Aggregation, AlgorithmContext, Decisions, Loss, PlainAlgorithm
from cosmos_core.protocols.frozen import Blend
from cosmos_core.protocols.objectives import limited, relative_rewards
from cosmos_core.types import Group

_LEAST_ERROR: Final = 1e-5
"""Of a prediction, that its squared error is divided by."""


class DiffusionNft(PlainAlgorithm):
    """Learns what is good of its own samples, and unlearns what is bad, by flow matching: no log-probs, any sampler.

        g = A / A_max / 2 + 1/2, with A = (R - mean of group) / (std of group + eps) within ± A_max
        v⁺ = β v + (1 - β) v_old,  v⁻ = (1 + β) v_old - β v
        loss = A_max (g ‖x̂⁺ - x_0‖² / w⁺ + (1 - g) ‖x̂⁻ - x_0‖² / w⁻) / β

    x̂ is the sample that a velocity stands for, x_t - t v; norms are means over dimensions; w is the detached mean
    absolute error, at least 1e-5. v_old is the moving average of the policy, which generates, too.

    Source: 2509.16117, equations 5 and 6, and its adaptive weighting. Deviations: A_max / β scales the loss, as in the
    authors' code; there is no divergence from a reference, which would be a second question about the same decisions;
    sample standard deviation.

    Raises:
        ConfigError: Rollouts come from other weights than the average.
    """

    def __init__(self, options: DiffusionNftOptions, context: AlgorithmContext) -> None:
        if not context.generates_average:
            raise ConfigError(
                "policy.average.publish: diffusion-nft compares the policy with the average that generates, and here "
                "rollouts come from the trained weights; add a table [policy.average] with publish = true"
            )
        self.aggregation = Aggregation(options.aggregation)
        # v⁺ has a share of β of the policy, v⁻ of -β.
        self.consults = {"average": Blend(shares=(options.beta, -options.beta))}
        self._options: Final = options

    def advantages(self, groups: Sequence[Group]) -> list[list[float | None]]:
        """Rewards relative to their prompt's, within the limit."""
        relative = relative_rewards(groups, eps=self._options.advantage_eps, spread=self._options.spread)
        return limited(relative, self._options.advantage_limit)

    def loss(self, decisions: Decisions) -> Loss:
        """The squared errors of both blends, by how good the sample is."""
        blended = decisions.frozen["average"].blended
        assert blended is not None
        limit = self._options.advantage_limit
        goodness_N = (decisions.advantages_N / (2.0 * limit) + 0.5).clamp(min=0.0, max=1.0)
        errors_NK = blended.squared_NK / blended.absolute_NK.clamp(min=_LEAST_ERROR)
        price_N = goodness_N * errors_NK[:, 0] + (1.0 - goodness_N) * errors_NK[:, 1]
        squared_NK = blended.squared_NK.detach()
        return Loss(
            loss_N=price_N * (limit / self._options.beta),
            metrics={"goodness": goodness_N, "good_error": squared_NK[:, 0], "bad_error": squared_NK[:, 1]},
        )
