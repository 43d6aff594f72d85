"""On-policy distillation: the policy learns, on what it generates itself, what a teacher would say there."""

from cosmos_algorithm_distill.exact import ExactDistillation
from cosmos_algorithm_distill.options import DistillOptions
from cosmos_algorithm_distill.sampled import SampledDistillation

__all__ = ["DistillOptions", "ExactDistillation", "SampledDistillation"]
