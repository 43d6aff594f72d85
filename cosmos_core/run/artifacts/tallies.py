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
        num_unscored: Those without a score.
        mean: Mean score; None if nothing was scored and unscored prompts do not count.
        low: Lower end of the 95 % confidence interval of the mean.
        high: Its upper end.
    """

    label: str
    num_prompts: int
    num_unscored: int
    mean: float | None
    low: float | None
    high: float | None


def tally(label: str, scores: Sequence[float | None], *, unscored: float | None = 0.0) -> Tally:
    """Sum up the scores of one prompt or more; None stands for a prompt without one.

    Args:
        label: What the prompts have in common.
        scores: One of each prompt.
        unscored: What a prompt without a score counts as; None where it does not count.
    """
    counted = (unscored if score is None else score for score in scores)
    values = [value for value in counted if value is not None]
    mean = math.fsum(values) / len(values) if values else None
    low, high = interval(values) if values else (None, None)
    return Tally(label=label, num_prompts=len(scores), num_unscored=scores.count(None), mean=mean, low=low, high=high)


def tallies(scored: Iterable[tuple[Prompt, float | None]], key: str, *, unscored: float | None = 0.0) -> list[Tally]:
    """Sum up the scores by a key of the prompts' metadata, in order of the labels.

    A prompt whose value is a list counts for each of it; one without the key counts as `(none)`. `unscored` is that of
    `tally`.
    """
    groups: dict[str, list[float | None]] = {}
    for prompt, score in scored:
        for label in _labels(prompt.metadata, key):
            groups.setdefault(label, []).append(score)
    return [tally(label, groups[label], unscored=unscored) for label in sorted(groups)]


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
