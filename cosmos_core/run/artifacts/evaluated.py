"""What came of an evaluation, for people and for programs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import attrs

from cosmos_core.config.job import Unit, score_name
from cosmos_core.config.structure import unstructure
from cosmos_core.errors import ConfigError
from cosmos_core.run.artifacts.tallies import Tally


@attrs.frozen(kw_only=True)
class Evaluated:
    """What came of an evaluation.

    Attributes:
        score: As in a run's own evaluations, None where no prompt was scored. Of tokens the accuracy, the mean of the
            first reward, of which unscored prompts count 0; of denoised samples the mean reward of the scored prompts.
        num_prompts: Held-out prompts.
        num_unscored: Those without a score.
        num_truncated: Those cut at the longest length.
        rewards: Mean of each reward over the scored prompts.
        total: The same score of all held-out prompts that can be read, and its confidence interval; None if none can.
        groups: The same for the prompts of each label, where a key of the metadata to group by was given.
        unit: What the samples are made of, which decides what the score is.
    """

    score: float | None
    num_prompts: int
    num_unscored: int
    num_truncated: int
    rewards: dict[str, float]
    total: Tally | None = None
    groups: tuple[Tally, ...] = ()
    unit: Unit = "token"


def figures(evaluated: Evaluated) -> Iterator[str]:
    """The figures of all prompts, line by line."""
    score = "not measured" if evaluated.score is None else f"{evaluated.score:.4f}"
    yield f"held-out {score_name(evaluated.unit)} {score}"
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
    """Refuse a file that cannot be made, before anything is evaluated.

    Raises:
        ConfigError: Its folder does not exist.
    """
    if path is not None and not path.absolute().parent.is_dir():
        raise ConfigError(f"--output: no folder {path.absolute().parent}; make it, or name another file")


def write(evaluated: Evaluated, path: Path, by: str | None) -> None:
    """Write the figures as JSON; the score is under its name, `accuracy` or `reward`.

    Raises:
        ConfigError: The file cannot be written.
    """
    said = {score_name(evaluated.unit): evaluated.score, **unstructure(evaluated), "by": by}
    del said["score"]
    try:
        path.write_text(json.dumps(said, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--output: {path} cannot be written: {error.strerror}") from error
