"""Makes the objective that options ask for."""

from __future__ import annotations

from cosmos_algorithm_grpo.objective import Objective, Shaping
from cosmos_algorithm_grpo.options import ClippedOptions, PolicyOptions, WeightedOptions
from cosmos_algorithm_grpo.shaped import ShapedObjective
from cosmos_algorithm_grpo.surrogate import Clip, Surrogate, Weight
from cosmos_algorithm_grpo.turns import TurnObjective
from cosmos_core.protocols import AlgorithmContext


def clipped(options: ClippedOptions, context: AlgorithmContext, *, shaping: Shaping = lambda _: 0.0) -> Objective:
    """An objective whose ratio is clipped.

    Raises:
        ConfigError: See `Objective`.
    """
    clip = Clip(low=options.clip_low, high=options.clip_high, dual=options.dual_clip)
    return _objective(options, context, clip, shaping)


def weighted(options: WeightedOptions, context: AlgorithmContext) -> Objective:
    """An objective whose ratio is a detached weight.

    Raises:
        ConfigError: See `Objective`.
    """
    return _objective(options, context, Weight(floor=options.weight_floor, cap=options.weight_cap), lambda _: 0.0)


def _objective(options: PolicyOptions, context: AlgorithmContext, surrogate: Surrogate, shaping: Shaping) -> Objective:
    # Only one whose advantages differ within a sequence has `estimate`, which costs the trainer a pass of its own.
    is_shaped = options.kl_weight > 0.0 and options.kl_place == "reward"
    kind = ShapedObjective if is_shaped else TurnObjective if options.credit == "turn" else Objective
    return kind(options, context, surrogate=surrogate, shaping=shaping)
