"""Mean scores of held-out prompts with their confidence intervals, as lines for people and a file for programs."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import attrs

from cosmos_core.config.structure import unstructure
from cosmos_core.errors import ConfigError
from cosmos_core.types import Prompt

_Z: Final = 1.959963984540054
"""Of a standard normal distribution, 95 % is within so many standard deviations."""
UNLABELLED: Final = "(none)"


@attrs.frozen(kw_only=True)
class MeanScore:
    """The mean score of some prompts, and its confidence interval.

    Attributes:
        label: What the prompts have in common.
        num_unscored: Those without a score.
        mean: Mean score; None if nothing was scored and unscored prompts do not count.
        low: Lower end of the 95 % confidence interval of the mean.
    """

    label: str
    num_prompts: int
    num_unscored: int
    mean: float | None
    low: float | None
    high: float | None


def mean_score(label: str, scores: Sequence[float | None], *, unscored: float | None = 0.0) -> MeanScore:
    """Sum up the scores of some prompts; one without a score (None) counts as `unscored`, or not if that is None."""
    counted = (unscored if score is None else score for score in scores)
    values = [value for value in counted if value is not None]
    mean = math.fsum(values) / len(values) if values else None
    low, high = interval(values) if values else (None, None)
    return MeanScore(
        label=label, num_prompts=len(scores), num_unscored=scores.count(None), mean=mean, low=low, high=high
    )


def mean_scores_by(
    scored: Iterable[tuple[Prompt, float | None]], key: str, *, unscored: float | None = 0.0
) -> list[MeanScore]:
    """Sum up the scores by a key of the prompts' metadata, in order of the labels.

    A prompt whose value is a list counts for each of it; one without the key counts as `(none)`. `unscored` is that of
    `mean_score`.
    """
    groups: dict[str, list[float | None]] = {}
    for prompt, score in scored:
        for label in _labels(prompt.metadata, key):
            groups.setdefault(label, []).append(score)
    return [mean_score(label, groups[label], unscored=unscored) for label in sorted(groups)]


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


@attrs.frozen(kw_only=True)
class Evaluated:
    """The result of an evaluation.

    Attributes:
        name: `accuracy` or `reward`.
        score: As in a run's own evaluations, None where no prompt was scored. The accuracy is the mean of the first
            reward, of which unscored prompts count 0; the reward the mean reward of the scored prompts.
        num_prompts: Held-out prompts.
        num_unscored: Those without a score.
        num_truncated: Those cut at the longest length.
        rewards: Mean of each reward over the scored prompts.
        total: The same score of all held-out prompts that can be read, and its confidence interval; None if none can.
        groups: The same for the prompts of each label, where a key of the metadata to group by was given.
    """

    score: float | None
    num_prompts: int
    num_unscored: int
    num_truncated: int
    rewards: dict[str, float]
    total: MeanScore | None = None
    groups: tuple[MeanScore, ...] = ()
    name: str = "accuracy"


def figures(evaluated: Evaluated) -> Iterator[str]:
    """The figures of all prompts, line by line."""
    score = "not measured" if evaluated.score is None else f"{evaluated.score:.4f}"
    yield f"held-out {evaluated.name} {score}"
    yield f"prompts {evaluated.num_prompts}, unscored {evaluated.num_unscored}, truncated {evaluated.num_truncated}"
    for name, value in evaluated.rewards.items():
        yield f"reward {name} {value:.4f}"


def lines(evaluated: Evaluated, by: str) -> Iterator[str]:
    """A table of the groups, line by line."""
    rows = [*evaluated.groups, *(() if evaluated.total is None else (evaluated.total,))]
    width = max([len(by), *(len(each.label) for each in rows)])
    yield f"{by:<{width}}  prompts  unscored      mean  95 % interval"
    for each in rows:
        found = f"{each.label:<{width}}  {each.num_prompts:>7}  {each.num_unscored:>8}"
        measured = "not measured" if each.mean is None else f"{each.mean:>8.4f}  {each.low:.4f} to {each.high:.4f}"
        yield f"{found}  {measured}"


def check_place(path: Path | None) -> None:
    """Refuse a file that cannot be made, before anything is evaluated, by a ConfigError."""
    if path is not None and not path.absolute().parent.is_dir():
        raise ConfigError(f"--output: no folder {path.absolute().parent}; make it, or name another file")


def write(evaluated: Evaluated, path: Path, by: str | None) -> None:
    """Write the figures as JSON; the score is under its name, `accuracy` or `reward`."""
    said = {evaluated.name: evaluated.score, **unstructure(evaluated), "by": by}
    del said["score"], said["name"]
    try:
        path.write_text(json.dumps(said, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--output: {path} cannot be written: {error.strerror}") from error
