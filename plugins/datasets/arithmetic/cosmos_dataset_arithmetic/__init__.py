"""Two-step arithmetic word problems with a careless demonstrator."""

from cosmos_dataset_arithmetic.plugin import Arithmetic, ArithmeticOptions
from cosmos_dataset_arithmetic.problem import Problem

__all__ = ["Arithmetic", "ArithmeticOptions", "Problem"]
