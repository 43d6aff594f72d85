"""The policy term of each decision: a ratio that is clipped, or a weight.

Shape legend: N decisions of a micro-batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import attrs

from cosmos_core.protocols import Loss
from cosmos_core.protocols.objectives import clipped_surrogate

if TYPE_CHECKING:
    import torch


class Surrogate(Protocol):
    """Prices decisions."""

    def __call__(self, *, logprobs_N: torch.Tensor, log_ratio_N: torch.Tensor, advantages_N: torch.Tensor) -> Loss:
        """The price of each decision, and metrics.

        Args:
            logprobs_N: float32, with gradient.
            log_ratio_N: float32, log(new / old) within ±20, with gradient.
            advantages_N: float32, detached.
        """
        ...


@attrs.frozen(kw_only=True)
class Clip:
    """-min(r A, clip(r, 1 - low, 1 + high) A): the gradient flows through the ratio r, and is 0 where it is clipped.

    Attributes:
        low: The ratio counts down to 1 - low; 1 does not bound it.
        high: The ratio counts up to 1 + high.
        dual: With a negative advantage A, the surrogate counts down to dual · A; None does not bound it.

    Source: 1707.06347, equation 7; dual clip 1912.09729; asymmetric bounds 2503.14476, equation 10.
    Deviation: log r is limited to ±20, so that r is finite.
    """

    low: float
    high: float
    dual: float | None = None

    def __call__(self, *, logprobs_N: torch.Tensor, log_ratio_N: torch.Tensor, advantages_N: torch.Tensor) -> Loss:  # noqa: ARG002 - of the protocol
        """The price of each decision, `ratio` and `clip_fraction` (decisions whose gradient the bounds removed)."""
        priced = clipped_surrogate(log_ratio_N, advantages_N, low=self.low, high=self.high)
        if self.dual is None:
            return priced
        most_N = -self.dual * advantages_N
        above_N = (advantages_N < 0) & (priced.loss_N.detach() > most_N)
        clip_fraction_N = priced.metrics["clip_fraction"].masked_fill(above_N, 1.0)
        return Loss(
            loss_N=most_N.where(above_N, priced.loss_N),
            metrics={**priced.metrics, "clip_fraction": clip_fraction_N},
        )


@attrs.frozen(kw_only=True)
class Weight:
    """-w A log p with the detached weight w = clip(r, floor, cap): the gradient flows through log p, of every decision.

    Attributes:
        floor: Least weight; 0 does not bound it.
        cap: Largest weight.

    Source: 2506.13585, equations 4 and 5; 2505.24034, with a cap alone.
    Deviation: log r is limited to ±20, so that r is finite.
    """

    floor: float
    cap: float

    def __call__(self, *, logprobs_N: torch.Tensor, log_ratio_N: torch.Tensor, advantages_N: torch.Tensor) -> Loss:
        """The price of each decision, `ratio` and `clip_fraction` (decisions whose weight is not their ratio)."""
        ratio_N = log_ratio_N.detach().exp()
        weight_N = ratio_N.clamp(min=self.floor, max=self.cap)
        metrics = {"ratio": ratio_N, "clip_fraction": (weight_N != ratio_N).to(ratio_N.dtype)}
        return Loss(loss_N=-weight_N * advantages_N * logprobs_N, metrics=metrics)
