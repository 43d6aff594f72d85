"""The clipped surrogate of each decision.

Tensors' own methods are used throughout, so that importing an algorithm imports no torch.

Shape legend: N decisions of a micro-batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import attrs

from cosmos_core.protocols import Loss

if TYPE_CHECKING:
    import torch

LOG_RATIO_LIMIT: Final = 20.0
"""e^20 is far outside every clip range and still finite in float32."""


@attrs.frozen(kw_only=True)
class Clip:
    """How far the ratio counts.

    Attributes:
        low: The ratio counts down to 1 - low.
        high: The ratio counts up to 1 + high.
        dual: With a negative advantage A, the surrogate counts down to dual · A; None does not bound it.
    """

    low: float
    high: float
    dual: float | None = None


def log_ratio(logprobs_N: torch.Tensor, old_logprobs_N: torch.Tensor) -> torch.Tensor:
    """log(new / old), limited so that its exponential is finite."""
    return (logprobs_N - old_logprobs_N).clamp(min=-LOG_RATIO_LIMIT, max=LOG_RATIO_LIMIT)


def clipped_surrogate(
    *, logprobs_N: torch.Tensor, old_logprobs_N: torch.Tensor, advantages_N: torch.Tensor, clip: Clip
) -> Loss:
    """-min(r A, clip(r, 1 - low, 1 + high) A), r = exp(logprob - old logprob).

    Args:
        logprobs_N: float32, with gradient.
        old_logprobs_N: float32, detached: of the weights that the ratio compares with.
        advantages_N: float32, detached.
        clip: The bounds.

    Returns:
        The price of each decision, `ratio` and `clip_fraction` (decisions whose gradient the bounds removed).

    Source: 1707.06347, equation 7; dual clip 1912.09729; asymmetric bounds 2503.14476, equation 10.
    Deviation: log r is limited to ±20, so that r is finite.
    """
    ratio_N = log_ratio(logprobs_N, old_logprobs_N).exp()
    free_N = ratio_N * advantages_N
    bounded_N = ratio_N.clamp(min=1.0 - clip.low, max=1.0 + clip.high) * advantages_N
    surrogate_N = free_N.minimum(bounded_N)
    clipped_N = bounded_N.detach() < free_N.detach()
    if clip.dual is not None:
        floor_N = clip.dual * advantages_N
        below_N = (advantages_N < 0) & (surrogate_N.detach() < floor_N)
        surrogate_N = floor_N.where(below_N, surrogate_N)
        clipped_N = clipped_N | below_N
    metrics = {"ratio": ratio_N.detach(), "clip_fraction": clipped_N.to(ratio_N.dtype)}
    return Loss(loss_N=-surrogate_N, metrics=metrics)
