"""DAPO's soft punishment of completions that come close to the longest length."""

from __future__ import annotations


def length_reward(num_units: int, *, max_units: int, buffer_units: int) -> float:
    """The term added to the reward of a completion for its length: from 0 down to -1.

    0 up to `max_units - buffer_units`, then linear to -1 at `max_units`.

    Args:
        num_units: Generated units.
        max_units: Longest completion.
        buffer_units: Length of the punished end; 0 punishes nothing.

    Source: 2503.14476, equation 13. Its third case cannot occur: no completion is longer than `max_units`.
    """
    over = num_units - (max_units - buffer_units)
    if over <= 0 or buffer_units == 0:
        return 0.0
    return -over / buffer_units
