"""Advantages relative to the other samples of the same prompt.

Unscored samples have no advantage and take no part in their group's statistics.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

Rewards: TypeAlias = Sequence[float | None]
"""The rewards of one group, None where a sample has none."""


def scored(rewards: Rewards) -> list[float]:
    """The rewards that there are."""
    return [reward for reward in rewards if reward is not None]


def all_equal(rewards: Rewards) -> bool:
    """Whether no scored sample is better than another: nothing can be learnt from such a group."""
    return len(set(scored(rewards))) <= 1


def normalised(rewards: Rewards, *, eps: float) -> list[float | None]:
    """(R - mean) / (std + eps), with the sample standard deviation (divisor n - 1).

    A group of equal rewards has advantages of exactly 0, whatever rounding leaves of R - mean.

    Source: 2402.03300, section 4.1.2 (outcome supervision). Deviations: `eps`, and the sample standard deviation
    where the paper does not say which.
    """
    centred = mean_only(rewards)
    known = scored(centred)
    if all_equal(rewards):
        return centred
    std = math.sqrt(sum(value * value for value in known) / (len(known) - 1))
    return [None if value is None else value / (std + eps) for value in centred]


def mean_only(rewards: Rewards) -> list[float | None]:
    """R - mean; exactly 0 where all are equal.

    Source: 2503.20783, section 3.2.
    """
    if all_equal(rewards):
        return [None if reward is None else 0.0 for reward in rewards]
    known = scored(rewards)
    mean = math.fsum(known) / len(known)
    return [None if reward is None else reward - mean for reward in rewards]
