"""DAPO: decoupled clip and dynamic sampling policy optimisation.

    R' = R + penalty · length reward, A = (R' - mean of group) / (std of group + eps)
    loss = mean over all tokens of -min(r A, clip(r, 1 - ε_low, 1 + ε_high) A), over groups whose rewards differ

Source: 2503.14476, equations 8 to 13: asymmetric clip range, token-level loss, groups without contrast refilled,
soft punishment of overlong completions.
Deviations: as in `grpo`; a group has no contrast when all its rewards are equal (for rewards of right and wrong
that is the paper's condition), judged before lengths are punished.
"""

from __future__ import annotations

import attrs
from attrs import validators as check

from cosmos_algorithm_grpo.making import clipped
from cosmos_algorithm_grpo.objective import CAPABILITIES, Objective
from cosmos_algorithm_grpo.options import ClippedOptions
from cosmos_algorithm_grpo.overlong import length_reward
from cosmos_algorithm_grpo.preset import defaults
from cosmos_core.config import option
from cosmos_core.protocols import Algorithm, AlgorithmContext, Provider, hookimpl
from cosmos_core.types import Sample


@attrs.frozen(kw_only=True, field_transformer=defaults(clip_high=0.28, dynamic_sampling=True))
class DapoOptions(ClippedOptions):
    """Options of `dapo`."""

    overlong_share: float = option(
        0.2,
        help="Last part of `rollout.sampling.max_units` in which a completion loses reward; 0 punishes nothing.",
        validator=check.and_(check.ge(0.0), check.le(1.0)),
        dynamic=True,
    )
    overlong_penalty: float = option(
        1.0, help="Reward that a completion of the longest length loses.", validator=check.ge(0.0), dynamic=True
    )


def dapo(options: DapoOptions, context: AlgorithmContext) -> Objective:
    """The clipped objective on rewards that are shaped by length."""
    buffer_units = round(options.overlong_share * context.max_units)

    def shaping(sample: Sample) -> float:
        reward = length_reward(sample.num_units, max_units=context.max_units, buffer_units=buffer_units)
        return options.overlong_penalty * reward

    return clipped(options, context, shaping=shaping)


@hookimpl
def cosmos_algorithm() -> Provider[Algorithm]:
    """Provide DAPO."""
    return Provider(create=dapo, options=DapoOptions, capabilities=CAPABILITIES)
