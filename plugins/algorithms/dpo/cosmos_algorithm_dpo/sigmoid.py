"""The logistic function of one number, without overflow."""

from __future__ import annotations

import math


def sigmoid(x: float) -> float:
    """1 / (1 + e^-x)."""
    if x >= 0.0:
        return 1.0 / (1.0 + math.exp(-x))
    return math.exp(x) / (1.0 + math.exp(x))


def log_sigmoid(x: float) -> float:
    """Log of `sigmoid`."""
    return min(x, 0.0) - math.log1p(math.exp(-abs(x)))
