"""What algorithm and model report of each step, beside what the core measures of all runs.

The loss of demonstrations beside rollouts, which only some runs have, is with them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from cosmos_core.control.live.timeline import TimedStep
from cosmos_core.protocols import is_core_metric

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
