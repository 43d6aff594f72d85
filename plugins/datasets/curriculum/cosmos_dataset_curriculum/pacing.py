"""The number of the easiest rows that are available, by prompts drawn.

Source: Platanios et al. (2019), "Competence-based Curriculum Learning for Neural Machine Translation",
arXiv:1903.09848: the linear and the square-root competence functions. Deviations: competence grows in jumps, the first
at its initial value, and rows are drawn without replacement while it stays.
"""

from __future__ import annotations

import itertools
import math
from typing import Final, Literal

from cosmos_core.protocols.dataset import Window

_ROUNDING: Final = 1e-6


def competence(time: float, start: float, pacing: Literal["root", "linear"]) -> float:
    """Share of the rows that is available.

    Args:
        time: Share of the schedule that is over, in [0, 1].
        start: The share at time 0.
        pacing: `linear`: start + (1 - start) t. `root`: sqrt(start² + (1 - start²) t).
    """
    if pacing == "linear":
        return start + (1.0 - start) * time
    return math.sqrt(start**2 + (1.0 - start**2) * time)


def windows(
    num_prompts: int, num_rows: int, *, start: float, pacing: Literal["root", "linear"], num_windows: int
) -> tuple[Window, ...]:
    """The windows of a schedule; those of no prompts are left out.

    Args:
        num_prompts: Prompts of the whole schedule.
        num_rows: Rows of the whole dataset.
        start: Share of them that is available at first.
        pacing: See `competence`.
        num_windows: In how many jumps it grows, evenly spread over the prompts.
    """
    ends = [num_prompts * number // num_windows for number in range(num_windows + 1)]
    # A share that rounding pushed above a whole number of rows is that number.
    sizes = [
        max(1, math.ceil(competence(number / num_windows, start, pacing) * num_rows - _ROUNDING))
        for number in range(num_windows)
    ]
    return tuple(
        Window(num_prompts=end - first, num_rows=size)
        for (first, end), size in zip(itertools.pairwise(ends), sizes, strict=True)
        if end > first
    )
