"""Rows that nothing was learnt or measured from, by reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from cosmos_core.config.job import Job
from cosmos_core.control.live.timeline import TimedStep

_BESIDE_DROPPED: Final = "imitation_dropped_"
"""How the names of metrics begin that count demonstrations beside rollouts; what follows is the reason."""
_SPLITS: Final = {"train": "train rows", "heldout": "held-out rows"}


def rows_of(job: Job, steps: Sequence[TimedStep]) -> dict[str, Any]:
    """What the dataset has, and what of it could not be used.

    Args:
        job: The run.
        steps: Its steps.

    Returns:
        `train` and `heldout`: how many rows have a number; `left_out`: of each split, the number of rows that have
        none, by reason, and where the first is; `imitation_dropped`: how often a demonstration to be imitated beside
        rollouts could not be, by reason. Prompts that were dropped when their turn came are counted with the prompts.
    """
    beside: Counter[str] = Counter()
    for timed in steps:
        for name, value in timed.record.metrics.items():
            if name.startswith(_BESIDE_DROPPED):
                beside[name.removeprefix(_BESIDE_DROPPED)] += round(value)
    return {
        "train": job.num_train_rows,
        "heldout": job.num_heldout_rows,
        "left_out": {
            split: {each.reason: {"rows": each.num_rows, "first": each.first} for each in job.omitted.get(split, ())}
            for split in ("train", "heldout")
        },
        "imitation_dropped": dict(sorted(beside.items())),
    }


def unused(summary: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, int]]]:
    """What the summary says was not used, samples apart, and how much of it for which reason."""
    rows = summary["rows"]
    told = [("prompts dropped", summary["prompts"]["dropped"])]
    told += [
        (f"{words} left out", {reason: each["rows"] for reason, each in rows["left_out"][split].items()})
        for split, words in _SPLITS.items()
    ]
    told.append(("demonstrations dropped", rows["imitation_dropped"]))
    measured = [each["dropped"] for each in summary["evaluations"] if "loss" in each]
    told.append(("held-out rows dropped", measured[-1] if measured else {}))
    yield from ((label, counts) for label, counts in told if counts)
