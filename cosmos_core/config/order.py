"""The order of prompts: which row a position of a stage is, and the seed of its samples.

All are pure functions of the run's seed, so that a resumed run, and any number of replicas, draw the same.
A permutation is evaluated one row at a time, in constant memory.

Source: format-preserving encryption by a Feistel network with cycle walking (Black and Rogaway, 2002,
"Ciphers with Arbitrary Finite Domains", method 2). Deviation: the round function is an integer mixer, not a
cipher, because a shuffle needs no secrecy.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from typing import Any, Final

from cosmos_core.protocols.dataset import Window

_ROUNDS: Final = 8
_MASK: Final = (1 << 64) - 1


def row_of(position: int, num_rows: int, seed: int, stage: int, windows: Sequence[Window] = ()) -> tuple[int, int]:
    """The epoch and row of a position in the stage's prompt stream, from 0.

    Each epoch visits every row of `range(num_rows)` exactly once, in an order of its own. Positions within a window go
    through its rows instead, in epochs and orders of its own; the first epoch of all rows begins after the last window.
    """
    if position < 0 or num_rows < 1:
        raise ValueError(f"position {position} of {num_rows} rows does not exist")
    for number, window in enumerate(windows):
        if position < window.num_prompts:
            return _shuffled(position, window.num_rows, f"{seed}/{stage}/window-{number}")
        position -= window.num_prompts
    return _shuffled(position, num_rows, f"{seed}/{stage}")


def window_problem(windows: Any, num_rows: int) -> str:
    """Say what is wrong with the windows of a stage over so many rows; empty if nothing is."""
    if not isinstance(windows, tuple) or not all(isinstance(window, Window) for window in windows):
        return f"{windows!r:.100}; return a tuple of cosmos_core.protocols.dataset.Window"
    for window in windows:
        if window.num_prompts < 1 or not 1 <= window.num_rows <= num_rows:
            return f"{window}; a window has 1 prompt or more, and 1 to {num_rows} rows, as many as there are"
    return ""


def _shuffled(position: int, num_rows: int, name: str) -> tuple[int, int]:
    """Epoch and row of a position in the shuffled epochs of `range(num_rows)` that `name` stands for."""
    epoch, place = divmod(position, num_rows)
    half = max(1, ((num_rows - 1).bit_length() + 1) // 2)
    keys = _round_keys(name, epoch)
    # The network permutes 4**half >= num_rows numbers; following it until it lands inside the range permutes the range.
    row = _permute(place, half, keys)
    while row >= num_rows:
        row = _permute(row, half, keys)
    return epoch, row


def group_seed(seed: int, stage: int, position: int) -> int:
    """Sampling seed of a prompt's group, in `range(2**63)`; a prompt leased again draws the same numbers."""
    return int.from_bytes(_digest(f"group/{seed}/{stage}/{position}")[:8], "little") >> 1


def demonstration_seed(seed: int, stage: int, position: int, number: int = 0) -> int:
    """Seed of what is drawn to learn from a demonstration, in `range(2**63)`; other draws each time a row comes.

    `number` says which of several draws of the same demonstration.
    """
    return int.from_bytes(_digest(f"demonstration/{seed}/{stage}/{position}/{number}")[:8], "little") >> 1


def evaluation_seed(seed: int, row: int) -> int:
    """Seed of a held-out row, in `range(2**63)`: the same at every version, in a run and after it."""
    return int.from_bytes(_digest(f"evaluation/{seed}/{row}")[:8], "little") >> 1


def turn_seed(seed: int, sample: int, turn: int) -> int:
    """Sampling seed of one turn of a dialogue, from its group's (`group_seed`) or row's (`evaluation_seed`)."""
    return int.from_bytes(_digest(f"turn/{seed}/{sample}/{turn}")[:8], "little") >> 1


def _permute(number: int, half: int, keys: tuple[int, ...]) -> int:
    mask = (1 << half) - 1
    left, right = number >> half, number & mask
    for key in keys:
        left, right = right, left ^ (_mix(right ^ key) & mask)
    return left << half | right


def _mix(value: int) -> int:
    """The finalizer of SplitMix64."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


@functools.lru_cache(maxsize=256)
def _round_keys(name: str, epoch: int) -> tuple[int, ...]:
    digest = _digest(f"order/{name}/{epoch}")
    return tuple(int.from_bytes(digest[8 * index : 8 * index + 8], "little") for index in range(_ROUNDS))


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=8 * _ROUNDS).digest()
