"""Building blocks of algorithms that compare the policy with the weights that generated, or with a reference.

Tensors' own methods are used, so that importing it imports no torch.

Shape legend: N decisions of a micro-batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from cosmos_core.protocols.algorithm import AlgorithmContext, Decisions, Loss

if TYPE_CHECKING:
    import torch

_LOG_RATIO_LIMIT: Final = 20.0
"""e^20 is far outside of every clip range and still finite in float32."""


def log_ratio(logprobs_N: torch.Tensor, old_logprobs_N: torch.Tensor) -> torch.Tensor:
    """log(new / old) of each decision, limited to ±20 so that its exponential is finite."""
    return (logprobs_N - old_logprobs_N).clamp(min=-_LOG_RATIO_LIMIT, max=_LOG_RATIO_LIMIT)


def clipped_surrogate(log_ratio_N: torch.Tensor, advantages_N: torch.Tensor, *, low: float, high: float) -> Loss:
    """-min(r A, clip(r, 1 - low, 1 + high) A) of each decision.

    Args:
        log_ratio_N: log r, as `log_ratio` gives it, with the gradient.
        advantages_N: A, detached.
        low: The ratio counts down to 1 - low.
        high: The ratio counts up to 1 + high.

    Returns:
        Prices, and as metrics `ratio` and `clip_fraction` (decisions whose gradient the bounds removed).

    Source: 1707.06347, equation 7; asymmetric bounds 2503.14476, equation 10.
    """
    ratio_N = log_ratio_N.exp()
    free_N = ratio_N * advantages_N
    bounded_N = ratio_N.clamp(min=1.0 - low, max=1.0 + high) * advantages_N
    is_clipped_N = bounded_N.detach() < free_N.detach()
    metrics = {"ratio": ratio_N.detach(), "clip_fraction": is_clipped_N.to(ratio_N.dtype)}
    return Loss(loss_N=-free_N.minimum(bounded_N), metrics=metrics)


def add_divergence(priced: Loss, decisions: Decisions, weight: float) -> Loss:
    """Prices with `weight` times the divergence from the reference, and it as the metric `reference_kl`.

    Args:
        priced: Prices without it.
        decisions: Of an algorithm that asks the reference for a `Divergence` where the weight is above 0.
        weight: At 0, the reference is not looked at.
    """
    if weight == 0.0:
        return priced
    kl_N = decisions.frozen["reference"].divergence_N
    assert kl_N is not None, "the reference is asked for a divergence"
    return Loss(loss_N=priced.loss_N + weight * kl_N, metrics={**priced.metrics, "reference_kl": kl_N.detach()})


def refuse_recomputed(context: AlgorithmContext, *, instead: str = "") -> str | None:
    """Why a ratio to log-probs that are recomputed at the start of the step leaves samples uncorrected.

    Args:
        context: What the recipe says.
        instead: What else can be set, of the algorithm's own options.

    Returns:
        The option, why it does not fit and what does, for a `ConfigError`; None where the weights at the start of the
        step are those that generated.
    """
    problems, remedies = [], []
    if context.max_staleness > 0:
        problems.append(f"samples up to {context.max_staleness} steps old")
        remedies.append("sync.mode = 'sync'")
    if context.generates_average:
        problems.append("samples of the average of the weights (policy.average.publish)")
        remedies.append("policy.average.publish = false")
    if not problems:
        return None
    choices = ", ".join(filter(None, [instead, "old_logprobs = 'behaviour'"]))
    return (
        "old_logprobs = 'recompute': the ratio would compare the weights of one step with themselves, and "
        f"{', '.join(problems)} would go uncorrected; set {choices}, or {' and '.join(remedies)}"
    )
