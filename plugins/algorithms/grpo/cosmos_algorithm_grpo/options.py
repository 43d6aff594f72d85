"""Options of every preset: which part stands in each place. Presets give them other defaults."""

from __future__ import annotations

from typing import Literal

import attrs
from attrs import validators as check

from cosmos_algorithm_grpo.advantage import Baseline, Scale
from cosmos_algorithm_grpo.kl import Estimator
from cosmos_core.config import option


@attrs.frozen(kw_only=True)
class PolicyOptions:
    """Options of every objective."""

    baseline: Baseline = option(
        "group-mean",
        help="What a reward is compared with: `group-mean`, the mean of its prompt's samples; `leave-one-out`, the "
        "mean of the other ones; `none`.",
    )
    scale: Scale = option(
        "group-std",
        help="What advantages are divided by: `group-std`, the deviation of their prompt's rewards; `batch`, which "
        "also takes off the mean, the deviation over all decisions of the step's batch; `none`.",
    )
    advantage_eps: float = option(
        1e-6, help="Added to the standard deviation that advantages are divided by.", validator=check.ge(0.0)
    )
    credit: Literal["sample", "turn"] = option(
        "sample",
        help="What a decision counts with: `sample`, all that its sample was rewarded with; `turn`, what its dialogue "
        "was rewarded with from its turn on, compared with the same turn of the prompt's other samples.",
    )
    turn_discount: float = option(
        1.0,
        help='With `credit = "turn"`: discount of what is rewarded a turn later.',
        validator=check.and_(check.ge(0.0), check.le(1.0)),
    )
    dynamic_sampling: bool = option(
        False, help="Whether groups of equal rewards are dropped and refilled.", dynamic=True
    )
    ratio: Literal["token", "sequence"] = option(
        "token",
        help="Whose ratio a decision counts with: its own, or the geometric mean over its sequence.",
    )
    aggregation: Literal["token-mean", "sequence-mean-token-mean", "sequence-mean-token-sum"] = option(
        "token-mean",
        help="How decisions are averaged: each token alike; each sequence alike; or the mean over sequences of the sum "
        "over tokens, divided by `constant_length`.",
    )
    constant_length: int | None = option(
        None,
        help="Divisor of `sequence-mean-token-sum`; `rollout.sampling.max_units` if absent.",
        validator=check.optional(check.ge(1)),
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
    kl_weight: float = option(
        0.0,
        help="Weight of the divergence from a frozen reference model; above 0, the recipe needs [reference].",
        validator=check.ge(0.0),
    )
    kl_place: Literal["loss", "reward"] = option(
        "loss", help="Whether the divergence is a term of the loss, or taken off the reward of each decision."
    )
    kl_estimator: Estimator = option(
        "k3", help="How it is estimated from d = log(reference / policy): `k1`, -d; `k2`, d²/2; `k3`, e^d - 1 - d."
    )


@attrs.frozen(kw_only=True)
class ClippedOptions(PolicyOptions):
    """Options of objectives whose ratio is clipped."""

    clip_low: float = option(
        0.2,
        help="The ratio counts down to 1 - clip_low; 1 does not bound it below.",
        validator=check.and_(check.gt(0.0), check.le(1.0)),
        dynamic=True,
    )
    clip_high: float = option(0.2, help="The ratio counts up to 1 + clip_high.", validator=check.gt(0.0), dynamic=True)
    dual_clip: float | None = option(
        None,
        help="Bound of the ratio for negative advantages (3 is usual); absent, there is none.",
        validator=check.optional(check.gt(1.0)),
        dynamic=True,
    )


@attrs.frozen(kw_only=True)
class WeightedOptions(PolicyOptions):
    """Options of objectives whose ratio is a detached weight, so that no decision loses its gradient."""

    weight_floor: float = option(
        0.0,
        help="Least weight of a decision; 0 does not bound it.",
        validator=check.and_(check.ge(0.0), check.le(1.0)),
        dynamic=True,
    )
    weight_cap: float = option(5.0, help="Largest weight of a decision.", validator=check.ge(1.0), dynamic=True)
