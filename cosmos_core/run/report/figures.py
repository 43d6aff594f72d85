"""Where the time of each pool went, by plane: what replicas measured, under names for people."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from cosmos_core.config.job import Job
from cosmos_core.control.live.figures import TimedStep
from cosmos_core.protocols.algorithm import is_core_metric
from cosmos_core.run.follower import Follower

Planes = dict[str, dict[str, float]]
"""{pool: {activity: seconds}}."""

_POLICY: Final[Mapping[str, tuple[str, ...]]] = {
    "training": ("pack_s", "forward_backward_s", "optimizer_s"),
    "sample fetch": ("fetch_s",),
    "gradient exchange": ("reduce_s",),
    "weight publish": ("publish_s",),
    "held-out loss": ("heldout_s",),
    "waiting for samples": ("wait_s",),
}
"""Activity to the step metrics that it is the sum of; of several replicas, a metric is the slowest one's."""

_ROLLOUT: Final[Mapping[str, str]] = {
    "generation": "busy_s",
    "scoring (summed over concurrent requests)": "scoring_s",
    "weight load": "transfer_s",
    "paused for weights": "paused_s",
}
"""Activity to the gauge that counts it."""


def planes_of(follower: Follower, gauges: Mapping[str, Mapping[str, float]]) -> Planes:
    """Seconds by activity of each pool in this session (since the run was started or resumed last).

    The policy's are summed over steps, the rollout's are the mean of its replicas, the warm-up's waiting included.
    """
    found: Planes = {}
    rollouts = [(name, numbers) for name, numbers in gauges.items() if name.startswith("rollout-")]
    if rollouts:
        found["rollout"] = _rollout(rollouts, follower)
    begin = follower.sessions[-1][0] if follower.sessions else 0.0
    steps = [timed for timed in follower.steps if timed.time >= begin and "wait_s" in timed.record.metrics]
    if steps:
        found["policy"] = _policy(steps)
    return {pool: {name: round(value, 3) for name, value in parts.items()} for pool, parts in found.items()}


def _policy(steps: Sequence[TimedStep]) -> dict[str, float]:
    return {
        activity: sum(timed.record.metrics.get(name, 0.0) for timed in steps for name in names)
        for activity, names in _POLICY.items()
    }


def _rollout(replicas: Sequence[tuple[str, Mapping[str, float]]], follower: Follower) -> dict[str, float]:
    count = len(replicas)
    parts = {
        activity: sum(numbers.get(gauge, 0.0) for _, numbers in replicas) / count
        for activity, gauge in _ROLLOUT.items()
    }
    end = follower.sessions[-1][1] if follower.sessions else 0.0
    present = sum(max(0.0, end - follower.timeline.joined.get(name, end)) for name, _ in replicas) / count
    parts["waiting for prompts"] = max(0.0, present - parts["generation"] - parts["paused for weights"])
    return parts


_PART = 0.1
"""Of the steps, the first and the last that are averaged."""

_BESIDE = "imitation_"
"""How names of what is measured of demonstrations beside rollouts begin; what follows is the core's, or not."""


def own_measures(steps: Sequence[TimedStep]) -> Mapping[str, list[tuple[float, float]]]:
    """(step, value) of each measure that algorithm or model reports, by name."""
    found: dict[str, list[tuple[float, float]]] = {}
    for timed in steps:
        for name, value in sorted(timed.record.metrics.items()):
            is_own = name == _BESIDE + "loss" or not is_core_metric(name.removeprefix(_BESIDE))
            if is_own and math.isfinite(value):
                found.setdefault(name, []).append((float(timed.record.step), value))
    return found


def begun_and_ended(steps: Sequence[TimedStep]) -> dict[str, dict[str, float]]:
    """The mean of each such measure over the first tenth of the steps, and over the last."""
    found = {}
    for name, points in own_measures(steps).items():
        values = [value for _, value in points]
        number = max(1, round(_PART * len(values)))
        found[name] = {"first": math.fsum(values[:number]) / number, "last": math.fsum(values[-number:]) / number}
    return found


_BESIDE_DROPPED: Final = "imitation_dropped_"
"""How the names of metrics begin that count demonstrations beside rollouts; what follows is the reason."""
_SPLITS: Final = {"train": "train rows", "heldout": "held-out rows"}


def rows_of(job: Job, steps: Sequence[TimedStep]) -> dict[str, Any]:
    """Counts of the dataset's rows, and of those that could not be used.

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
    """Counts of what was not used, samples apart, by reason."""
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
