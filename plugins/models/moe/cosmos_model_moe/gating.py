"""The weights of chosen experts from router logits, as each family computes them.

Shape legend: U units, E experts, K experts of a unit.
"""

from __future__ import annotations

from typing import Final, Protocol

import attrs
import torch


class Gating(Protocol):
    """A family's reading of its router's logits."""

    @property
    def counts_per_choice(self) -> bool:
        """Tell whether the family's balance loss divides an expert's load by K."""
        ...

    def probabilities(self, logits_UE: torch.Tensor) -> torch.Tensor:
        """float32 [U, E] that sum to one for each unit: what the balance loss calls a unit's affinity."""
        ...

    def weights(self, router: torch.nn.Module, logits_UE: torch.Tensor, experts_UK: torch.Tensor) -> torch.Tensor:
        """The weights [U, K] with which a router combines these experts, whoever chose them."""
        ...


@attrs.frozen
class SoftmaxGating:
    """Qwen3-MoE: softmax over all experts, made to sum to one over the chosen ones if the config says so."""

    counts_per_choice: bool = False

    def probabilities(self, logits_UE: torch.Tensor) -> torch.Tensor:
        """Softmax in float32."""
        return torch.softmax(logits_UE, dim=-1, dtype=torch.float32)

    def weights(self, router: torch.nn.Module, logits_UE: torch.Tensor, experts_UK: torch.Tensor) -> torch.Tensor:
        """See `Gating`."""
        weights_UK = self.probabilities(logits_UE).gather(1, experts_UK)
        if router.norm_topk_prob:
            weights_UK = weights_UK / weights_UK.sum(-1, keepdim=True)
        return weights_UK.to(logits_UE.dtype)


@attrs.frozen
class SigmoidGating:
    """DeepSeek-V3: a sigmoid for each expert; its bias decides who is chosen, never the weight.

    Source: arXiv:2412.19437, equations 12 to 16.
    """

    counts_per_choice: bool = True

    def probabilities(self, logits_UE: torch.Tensor) -> torch.Tensor:
        """Sigmoids over their sum (equation 19)."""
        scores_UE = logits_UE.float().sigmoid()
        return scores_UE / scores_UE.sum(-1, keepdim=True)

    def weights(self, router: torch.nn.Module, logits_UE: torch.Tensor, experts_UK: torch.Tensor) -> torch.Tensor:
        """See `Gating`."""
        weights_UK = logits_UE.float().sigmoid().gather(1, experts_UK)
        if router.norm_topk_prob:
            # The same guard against zero as transformers', so that a replay of its own choice changes no bit.
            weights_UK = weights_UK / (weights_UK.sum(-1, keepdim=True) + 1e-20)
        scale: float = router.routed_scaling_factor  # type: ignore[assignment]
        return weights_UK * scale


SOFTMAX: Final = SoftmaxGating()
SIGMOID: Final = SigmoidGating()
