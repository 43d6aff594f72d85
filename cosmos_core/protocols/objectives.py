"""Building blocks of algorithms that compare the policy with the weights that generated, or with a reference.

Tensors' own methods are used, so that importing it imports no torch.

Shape legend: N decisions of a micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from cosmos_core.protocols.algorithm import Aggregation, AlgorithmContext, Decisions, Loss, OldLogprobs
from cosmos_core.protocols.frozen import Comparison, FrozenRole
from cosmos_core.types import Group

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
    """Say why a ratio to log-probs that are recomputed at the start of the step leaves samples uncorrected.

    Args:
        context: What the recipe says.
        instead: What else can be set, of the algorithm's own options.

    Returns:
        The option, why it does not fit and what does, for a `ConfigError`; None where there are no such samples.
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


Spread: TypeAlias = Literal["group", "batch"]


def refuse_nonfinite(group: Group) -> str | None:
    """Say why a group with a reward that is no finite number is dropped (see `Algorithm.admit`); else None."""
    known = [sample.reward for sample in group.samples if sample.is_scored and sample.reward is not None]
    return None if all(map(math.isfinite, known)) else "reward not finite"


def relative_rewards(groups: Sequence[Group], *, eps: float, spread: Spread = "group") -> list[list[float | None]]:
    """(R - mean of the group) / (std + eps) of each sample; None for an unscored one, which no statistic counts.

    A group of equal rewards has exactly 0, whatever rounding leaves of R - mean, and so has one with a single score.

    Args:
        groups: Of a step's whole batch.
        eps: Added to the standard deviation.
        spread: Whose standard deviation: of each group about its mean, or of the whole `batch` about the batch's.

    Source: 2402.03300, section 4.1.2. Deviations: `eps`, and the sample standard deviation (divisor n - 1).
    """
    rewards = [[sample.reward if sample.is_scored else None for sample in group.samples] for group in groups]
    whole = _deviation([reward for each in rewards for reward in each]) if spread == "batch" else None
    return [_relative(each, (_deviation(each) if whole is None else whole) + eps) for each in rewards]


def limited(advantages: Sequence[Sequence[float | None]], limit: float) -> list[list[float | None]]:
    """Advantages within ± `limit`; None stays None."""
    return [[None if each is None else min(max(each, -limit), limit) for each in values] for values in advantages]


def _relative(rewards: Sequence[float | None], divisor: float) -> list[float | None]:
    known = [each for each in rewards if each is not None]
    if len(set(known)) <= 1:
        return [None if reward is None else 0.0 for reward in rewards]
    mean = math.fsum(known) / len(known)
    return [None if reward is None else (reward - mean) / divisor for reward in rewards]


def _deviation(rewards: Sequence[float | None]) -> float:
    known = [each for each in rewards if each is not None]
    if len(known) < 2:
        return 0.0
    mean = math.fsum(known) / len(known)
    return math.sqrt(math.fsum((reward - mean) ** 2 for reward in known) / (len(known) - 1))


class PlainAlgorithm:
    """An algorithm that asks for nothing, for others to inherit; `advantages` and `loss` are theirs to add.

    What differs is said in the class, or in `__init__`. One that has all of `Algorithm` without inheriting is as good.

    Attributes:
        aggregation: Each decision of the batch alike.
        constant_length: Sums are not divided.
        old_logprobs: None are looked at.
        needs_entropy: No entropy term.
        skips_zero_advantage: Every sequence goes through the model.
        consults: No frozen models.
        needs_critic: No critic.
        num_demonstrations: Rollouts alone.
    """

    aggregation: Aggregation = Aggregation.TOKEN_MEAN
    constant_length: int = 1
    old_logprobs: OldLogprobs = "none"
    needs_entropy: bool = False
    skips_zero_advantage: bool = False
    consults: Mapping[FrozenRole, Comparison | None] = {}
    needs_critic: bool = False
    num_demonstrations: int = 0

    def admit(self, group: Group) -> str | None:
        """Train on every group whose rewards are finite numbers."""
        return refuse_nonfinite(group)

    def imitation(self, decisions: Decisions) -> Loss:
        """Refuse: one that has demonstrations says what they cost."""
        raise NotImplementedError(
            f"num_demonstrations is {self.num_demonstrations}, and {type(self).__name__} has no `imitation`; give both"
        )
