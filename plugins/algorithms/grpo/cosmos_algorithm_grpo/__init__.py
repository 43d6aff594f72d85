"""Group-relative policy optimisation and its kin: one module a preset, on parts that combine."""

from cosmos_algorithm_grpo.making import clipped, weighted
from cosmos_algorithm_grpo.objective import CAPABILITIES, Objective
from cosmos_algorithm_grpo.options import ClippedOptions, WeightedOptions
from cosmos_algorithm_grpo.preset import defaults

__all__ = ["CAPABILITIES", "ClippedOptions", "Objective", "WeightedOptions", "clipped", "defaults", "weighted"]
