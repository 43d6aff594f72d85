"""Which rows of a file are held out when no file of their own is given."""

from __future__ import annotations

import random
from array import array


def hold_out(num_rows: int, num_heldout: int) -> tuple[array[int], array[int]]:
    """Numbers of the train and the held-out rows, each in order.

    Rows are drawn at random, always the same ones: runs with different seeds are compared on the same rows.
    """
    heldout = set(random.Random("heldout").sample(range(num_rows), num_heldout))  # noqa: S311 - no secret
    train = array("Q", (number for number in range(num_rows) if number not in heldout))
    return train, array("Q", sorted(heldout))
