"""Building blocks of algorithms that compare the samples of a prompt with one another."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, TypeAlias

from cosmos_core.types import Group

Spread: TypeAlias = Literal["group", "batch"]


def refuse_nonfinite(group: Group) -> str | None:
    """Why a group with a reward that is no finite number is dropped (see `Algorithm.admit`); None to train on it."""
    known = [sample.reward for sample in group.samples if sample.is_scored and sample.reward is not None]
    return None if all(map(math.isfinite, known)) else "reward not finite"


def relative_rewards(groups: Sequence[Group], *, eps: float, spread: Spread = "group") -> list[list[float | None]]:
    """(R - mean of the group) / (std + eps) of each sample; None for an unscored one, which no statistic counts.

    A group of equal rewards has exactly 0, whatever rounding leaves of R - mean, and so has one with a single score.

    Args:
        groups: Of a step's whole batch.
        eps: Added to the standard deviation.
        spread: Whose standard deviation: of each group about its mean, or of the whole `batch` about the batch's.

    Source: 2402.03300, section 4.1.2. Deviations: `eps`, and the sample standard deviation (divisor n - 1) where the
    paper does not say which.
    """
    rewards = [[sample.reward if sample.is_scored else None for sample in group.samples] for group in groups]
    whole = _deviation([reward for each in rewards for reward in each]) if spread == "batch" else None
    return [_relative(each, (_deviation(each) if whole is None else whole) + eps) for each in rewards]


def limited(advantages: Sequence[Sequence[float | None]], limit: float) -> list[list[float | None]]:
    """Advantages within ± `limit`; None stays None."""
    return [[None if each is None else min(max(each, -limit), limit) for each in values] for values in advantages]


def _relative(rewards: Sequence[float | None], divisor: float) -> list[float | None]:
    known = _known(rewards)
    if len(set(known)) <= 1:
        return [None if reward is None else 0.0 for reward in rewards]
    mean = math.fsum(known) / len(known)
    return [None if reward is None else (reward - mean) / divisor for reward in rewards]


def _deviation(rewards: Sequence[float | None]) -> float:
    known = _known(rewards)
    if len(known) < 2:
        return 0.0
    mean = math.fsum(known) / len(known)
    return math.sqrt(math.fsum((reward - mean) ** 2 for reward in known) / (len(known) - 1))


def _known(rewards: Sequence[float | None]) -> list[float]:
    return [reward for reward in rewards if reward is not None]
