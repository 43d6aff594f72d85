"""What GRPO, Dr. GRPO and DAPO share: options, old log-probs, and the loss of a decision.

None of them has a KL or entropy term, so a sequence of advantage 0 has exactly zero gradient.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

import attrs
from attrs import validators as check

from cosmos_algorithm_grpo.correction import kept_sequences, masked_weight, truncated_weight
from cosmos_algorithm_grpo.surrogate import Clip, clipped_surrogate
from cosmos_core.config import option
from cosmos_core.errors import ConfigError
from cosmos_core.protocols import AlgorithmCapabilities, AlgorithmContext, Decisions, Loss, OldLogprobs
from cosmos_core.types import Group

if TYPE_CHECKING:
    import torch

CAPABILITIES: Final = AlgorithmCapabilities(
    source="rollouts",
    payload_kinds=frozenset({"tokens"}),
    min_group_size=2,
    logprob_semantics=frozenset({"processed"}),
)


@attrs.frozen(kw_only=True)
class ClippedOptions:
    """Options of every clipped objective."""

    clip_low: float = option(
        0.2,
        help="The ratio counts down to 1 - clip_low.",
        validator=check.and_(check.gt(0.0), check.lt(1.0)),
        dynamic=True,
    )
    clip_high: float = option(0.2, help="The ratio counts up to 1 + clip_high.", validator=check.gt(0.0), dynamic=True)
    dual_clip: float | None = option(
        None,
        help="Bound of the ratio for negative advantages (3 is usual); absent, there is none.",
        validator=check.optional(check.gt(1.0)),
        dynamic=True,
    )
    old_logprobs: Literal["behaviour", "recompute"] = option(
        "behaviour",
        help="What the ratio compares with: `behaviour`, the weights that generated each token, corrects for stale "
        "samples; `recompute`, the weights at the start of the step, costs one more forward.",
    )
    importance_cap: float | None = option(
        None,
        help="With `recompute`: weigh each token by the ratio of recomputed to behaviour probability, at most this.",
        validator=check.optional(check.gt(0.0)),
    )
    importance_floor: float | None = option(
        None,
        help="With `importance_cap`: a token whose ratio is below this or above the cap does not count at all (0.5 "
        "with a cap of 5 is usual); absent, the ratio is cut at the cap.",
        validator=check.optional(check.gt(0.0)),
    )
    sequence_limit: float | None = option(
        None,
        help="A sequence of negative advantage does not count if the mean of log(behaviour / current probability) of "
        "its tokens exceeds this; absent, all count.",
        validator=check.optional(check.gt(0.0)),
        dynamic=True,
    )


class ClippedObjective:
    """The part of an algorithm that prices decisions; subclasses add advantages and aggregation."""

    def __init__(self, options: ClippedOptions, context: AlgorithmContext) -> None:
        _check_correction(options, context)
        self._clip = Clip(low=options.clip_low, high=options.clip_high, dual=options.dual_clip)
        self._old_logprobs: OldLogprobs = options.old_logprobs
        self._importance_cap = options.importance_cap
        self._importance_floor = options.importance_floor
        self._sequence_limit = options.sequence_limit

    @property
    def constant_length(self) -> int:
        """Unused unless the aggregation divides by a constant length."""
        return 1

    @property
    def old_logprobs(self) -> OldLogprobs:
        """As the option says."""
        return self._old_logprobs

    @property
    def needs_entropy(self) -> bool:
        """No entropy term."""
        return False

    @property
    def skips_zero_advantage(self) -> bool:
        """Every term is a multiple of the advantage."""
        return True

    def admit(self, group: Group) -> str | None:  # noqa: ARG002 - the protocol's name for it
        """Every group is trained on."""
        return None

    def loss(self, decisions: Decisions) -> Loss:
        """Price decisions by the clipped surrogate, and weigh those that are off-policy as the options say."""
        assert decisions.old_logprobs_N is not None
        priced = clipped_surrogate(
            logprobs_N=decisions.logprobs_N,
            old_logprobs_N=decisions.old_logprobs_N,
            advantages_N=decisions.advantages_N,
            clip=self._clip,
        )
        loss_N, metrics = priced.loss_N, dict(priced.metrics)
        if self._importance_cap is not None:
            weight_N = self._weight(decisions.old_logprobs_N, decisions.behaviour_logprobs_N, self._importance_cap)
            loss_N = weight_N * loss_N
            metrics["importance_weight"] = weight_N
            if self._importance_floor is not None:
                metrics["masked_tokens"] = (weight_N == 0).to(weight_N.dtype)
        if self._sequence_limit is not None:
            kept_N = kept_sequences(
                logprobs_N=decisions.logprobs_N,
                behaviour_logprobs_N=decisions.behaviour_logprobs_N,
                advantages_N=decisions.advantages_N,
                sequence_N=decisions.sequence_N,
                num_sequences=decisions.num_sequences,
                limit=self._sequence_limit,
            )
            loss_N = kept_N * loss_N
            metrics["sequence_masked_tokens"] = 1.0 - kept_N
        return Loss(loss_N=loss_N, metrics=metrics)

    def _weight(self, old_N: torch.Tensor, behaviour_N: torch.Tensor, cap: float) -> torch.Tensor:
        if self._importance_floor is None:
            return truncated_weight(old_logprobs_N=old_N, behaviour_logprobs_N=behaviour_N, cap=cap)
        floor = self._importance_floor
        return masked_weight(old_logprobs_N=old_N, behaviour_logprobs_N=behaviour_N, floor=floor, cap=cap)


def rewards_of(group: Group) -> list[float | None]:
    """The reward of each sample, None where it has none that may be used."""
    return [sample.reward if sample.is_scored else None for sample in group.samples]


def _check_correction(options: ClippedOptions, context: AlgorithmContext) -> None:
    if options.old_logprobs == "behaviour" and options.importance_cap is not None:
        raise ConfigError(
            f"algorithm.options.importance_cap = {options.importance_cap}: it needs old_logprobs = 'recompute'; with "
            "'behaviour' the clipped ratio itself corrects for stale samples, so leave importance_cap out"
        )
    if options.importance_floor is not None and options.importance_floor >= (options.importance_cap or 0.0):
        raise ConfigError(
            f"algorithm.options.importance_floor = {options.importance_floor}: it is the lower end of a range whose "
            f"upper end is importance_cap, which is {options.importance_cap}; set a larger importance_cap, such as 5.0"
        )
    if options.old_logprobs == "recompute" and options.importance_cap is None and context.max_staleness > 0:
        raise ConfigError(
            "algorithm.options.old_logprobs = 'recompute': the ratio would compare the weights of one step with "
            f"themselves, and samples up to {context.max_staleness} steps old would go uncorrected; set "
            "importance_cap (2.0 is usual), old_logprobs = 'behaviour', or sync.mode = 'sync'"
        )
