"""Verifiable rewards for mathematical answers."""

from cosmos_reward_math.plugin import MathOptions, MathReward

__all__ = ["MathOptions", "MathReward"]
