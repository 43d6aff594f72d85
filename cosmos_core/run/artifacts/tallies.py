"""How good a model is on prompts of one kind: means and how sure they are."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import attrs

from cosmos_core.types import Prompt

_Z: Final = 1.959963984540054
"""Of a standard normal distribution, 95 % is within so many standard deviations."""
UNLABELLED: Final = "(none)"


@attrs.frozen(kw_only=True)
class Tally:
    """Scores of some prompts.

    Attributes:
        label: What the prompts have in common.
        num_prompts: How many there are.
        num_unscored: Those without a score, which count as 0.
        mean: Mean score.
        low: Lower end of the 95 % confidence interval of the mean.
        high: Its upper end.
    """

    label: str
    num_prompts: int
    num_unscored: int
    mean: float
    low: float
    high: float


def tally(label: str, scores: Sequence[float | None]) -> Tally:
    """Sum up the scores of one prompt or more; None stands for a prompt without one."""
    values = [0.0 if score is None else score for score in scores]
    mean = math.fsum(values) / len(values)
    low, high = interval(values)
    return Tally(label=label, num_prompts=len(values), num_unscored=scores.count(None), mean=mean, low=low, high=high)


def tallies(scored: Iterable[tuple[Prompt, float | None]], key: str) -> list[Tally]:
    """Sum up the scores by a key of the prompts' metadata, in order of the labels.

    A prompt whose value is a list counts for each of it; one without the key counts as `(none)`.
    """
    groups: dict[str, list[float | None]] = {}
    for prompt, score in scored:
        for label in _labels(prompt.metadata, key):
            groups.setdefault(label, []).append(score)
    return [tally(label, groups[label]) for label in sorted(groups)]


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % confidence interval of the mean.

    Where every value is 0 or 1 it is Wilson's score interval, which is never empty nor outside of [0, 1]; otherwise the
    mean and 1.96 standard errors to both sides.

    Source: Wilson (1927), "Probable inference, the law of succession, and statistical inference".
    """
    count = len(values)
    mean = math.fsum(values) / count
    if set(values) <= {0.0, 1.0}:
        spread = _Z * math.sqrt(mean * (1 - mean) / count + _Z**2 / (4 * count**2))
        centre, scale = mean + _Z**2 / (2 * count), 1 + _Z**2 / count
        return max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale)
    variance = math.fsum((value - mean) ** 2 for value in values) / max(1, count - 1)
    error = _Z * math.sqrt(variance / count)
    return mean - error, mean + error


def _labels(metadata: Mapping[str, object], key: str) -> list[str]:
    value = metadata.get(key)
    listed = value if isinstance(value, list) else [] if value is None else [value]
    return list(dict.fromkeys(map(str, listed))) or [UNLABELLED]
