"""Advantages of samples: rewards against a baseline, on a scale.

Unscored samples have no advantage and take no part in any statistics. Every standard deviation is the sample one
(divisor n - 1).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, TypeAlias

Rewards: TypeAlias = Sequence[float | None]
"""The rewards of one group, None where a sample has none."""
Baseline: TypeAlias = Literal["group-mean", "leave-one-out", "none"]
Scale: TypeAlias = Literal["group-std", "batch", "none"]


def scored(rewards: Rewards) -> list[float]:
    """The rewards that there are."""
    return [reward for reward in rewards if reward is not None]


def all_equal(rewards: Rewards) -> bool:
    """True if no scored sample is better than another: nothing can be learnt from such a group."""
    return len(set(scored(rewards))) <= 1


def centred(rewards: Rewards, baseline: Baseline) -> list[float | None]:
    """Rewards above their baseline.

    With a baseline, a group of equal rewards has exactly 0, whatever rounding leaves of R - mean, and so has a group
    with a single score.

    Args:
        rewards: Of one group.
        baseline: `group-mean`: the mean of the group. `leave-one-out`: the mean of the others of the group. `none`: 0.

    Source: group mean 2402.03300, section 4.1.2, and 2503.20783, section 3.2; leave-one-out 2402.14740.
    """
    if baseline == "none":
        return list(rewards)
    if all_equal(rewards):
        return [None if reward is None else 0.0 for reward in rewards]
    known = scored(rewards)
    mean = math.fsum(known) / len(known)
    # R - mean of the others = (R - mean of all) · n / (n - 1).
    factor = len(known) / (len(known) - 1) if baseline == "leave-one-out" else 1.0
    return [None if reward is None else (reward - mean) * factor for reward in rewards]


def over_group_deviation(values: Rewards, rewards: Rewards, *, eps: float) -> list[float | None]:
    """Values / (std of the group's rewards + eps); 0 in a group of equal rewards.

    Source: 2402.03300, section 4.1.2 (outcome supervision). Deviations: `eps`, and the sample standard deviation
    where the paper does not say which.
    """
    if all_equal(rewards):
        return [None if value is None else 0.0 for value in values]
    known = scored(rewards)
    mean = math.fsum(known) / len(known)
    std = math.sqrt(sum((reward - mean) ** 2 for reward in known) / (len(known) - 1))
    return [None if value is None else value / (std + eps) for value in values]


class Whitening:
    """(A - mean) / (std + eps) over all decisions of a batch, from the sums of its sequences.

    Exactly 0 where all decisions of the batch have one advantage, as far as rounding can tell.

    Args:
        sums: Of each sequence: its decisions, the sum of their advantages, and that of the squares.
        eps: Added to the standard deviation.

    Source: 2501.03262, equation 10 (global advantage normalisation). Deviations: `eps`, and the sample standard
    deviation where the paper does not say which.
    """

    def __init__(self, sums: Sequence[Sequence[float]], *, eps: float) -> None:
        number, total, squares = (math.fsum(column) for column in zip(*sums, strict=True)) if sums else (0.0, 0.0, 0.0)
        self.mean = total / max(number, 1.0)
        # Of sums in float64, rounding leaves less than this share of the squares.
        spread = squares - number * self.mean**2
        is_spread = number > 1.0 and spread > 1e-12 * squares
        self.factor = 1.0 / (math.sqrt(spread / (number - 1.0)) + eps) if is_spread else 0.0

    def __call__(self, value: float) -> float:
        """The advantage of a decision."""
        return (value - self.mean) * self.factor


def whitened(groups: Sequence[Rewards], num_units: Sequence[Sequence[int]], *, eps: float) -> list[list[float | None]]:
    """Whiten advantages over a batch, in which every sample counts once for each of its decisions.

    Args:
        groups: The values of each group.
        num_units: Decisions of each of its samples.
        eps: As of `Whitening`.
    """
    pairs = [
        (value, float(number))
        for values, numbers in zip(groups, num_units, strict=True)
        for value, number in zip(values, numbers, strict=True)
        if value is not None
    ]
    whiten = Whitening([(number, number * value, number * value * value) for value, number in pairs], eps=eps)
    return [[None if value is None else whiten(value) for value in values] for values in groups]
