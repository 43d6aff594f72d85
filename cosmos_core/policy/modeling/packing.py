"""Sequences of different lengths side by side in one row; padding, where a layout needs it, is a document apart.

Shape legend: U units of the row, S sequences of it, N decisions of it.

A sequence of P prompt and N completion tokens takes P + N - 1 places: its last token predicts nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np
import torch

from cosmos_core.errors import DataError
from cosmos_core.policy.modeling.tokens import values
from cosmos_core.protocols import MicroBatch
from cosmos_core.types import Payload

PAD_TOKEN: Final = 0
"""What fills a row up: any token will do, for a document of its own that decides nothing changes nothing."""
UNIFORM_STEPS: Final = 8
"""Rows of one size come in at most about this many sizes, so that a pipeline rarely meets a new shape."""


def fill_bins(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """First fit, longest first: indices of `lengths` in bins that sum to at most `capacity`.

    Deterministic; each bin is in descending order of length, so that equal lengths are neighbours.

    Raises:
        DataError: One length alone exceeds the capacity.
    """
    bins: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[index]
        if length > capacity:
            raise DataError(
                f"sequence {index} of {length} tokens exceeds the micro-batch budget of {capacity}; "
                "raise policy.micro_batch_units or lower rollout.sampling.max_units"
            )
        place = next((b for b, free in enumerate(room) if free >= length), None)
        if place is None:
            bins.append([index])
            room.append(capacity - length)
        else:
            bins[place].append(index)
            room[place] -= length
    return bins


def pack(payloads: Sequence[Payload], *, budget: int, multiple: int = 1, is_uniform: bool = False) -> list[MicroBatch]:
    """Pack token payloads into micro-batches of at most `budget` units, every payload exactly once.

    `inputs` of a micro-batch: `tokens` and `positions` int64 [U], `lengths` int64 [S] (one more where the row is
    padded: the padding is the last document), `decisions` int64 [N] (the place in U whose output predicts each
    completion token) and `targets` int64 [N].

    Args:
        payloads: What to pack.
        budget: Most units of a micro-batch, before it is padded.
        multiple: Units of each micro-batch are padded to a multiple of it.
        is_uniform: Whether all are padded to one size, of a few that the budget allows.

    Raises:
        DataError: A payload is no token payload, has an empty prompt, or alone exceeds the budget.
    """
    prompts = [values(payload, "prompt") for payload in payloads]
    completions = [values(payload, "completion") for payload in payloads]
    for index, prompt in enumerate(prompts):
        if not len(prompt):
            raise DataError(f"payload {index} has an empty prompt: the first completion token has nothing to follow")
    lengths = [max(len(p) + len(c) - 1, 1) for p, c in zip(prompts, completions, strict=True)]
    bins = fill_bins(lengths, budget)
    sizes = padded_sizes([sum(lengths[i] for i in members) for members in bins], budget, multiple, is_uniform)
    return [
        _lay_out(members, prompts, completions, [lengths[i] for i in members], size)
        for members, size in zip(bins, sizes, strict=True)
    ]


def padded_sizes(sizes: Sequence[int], budget: int, multiple: int, is_uniform: bool) -> list[int]:
    """Units of each row after padding (see `pack`)."""
    if not is_uniform:
        return [_round_up(size, multiple) for size in sizes]
    step = _round_up(max(1, budget // UNIFORM_STEPS), multiple)
    return [_round_up(max(sizes, default=0), step)] * len(sizes)


def _round_up(number: int, multiple: int) -> int:
    return math.ceil(number / multiple) * multiple


def _lay_out(
    members: list[int], prompts: Sequence[np.ndarray], completions: Sequence[np.ndarray], sizes: list[int], units: int
) -> MicroBatch:
    starts = np.cumsum([0, *sizes])
    padding = units - int(starts[-1])
    tokens = [np.concatenate((prompts[i], completions[i]))[:size] for i, size in zip(members, sizes, strict=True)]
    decisions = [
        np.arange(len(completions[i])) + (start + len(prompts[i]) - 1)
        for i, start in zip(members, starts[:-1], strict=True)
    ]
    documents = [*sizes, padding] if padding else sizes
    inputs = {
        "tokens": np.concatenate([*tokens, np.full(padding, PAD_TOKEN)]),
        "positions": np.concatenate([np.arange(size) for size in documents]),
        "lengths": np.asarray(documents),
        "decisions": np.concatenate(decisions),
        "targets": np.concatenate([completions[i] for i in members]),
    }
    return MicroBatch(
        sequences=tuple(members),
        num_decisions=tuple(len(completions[i]) for i in members),
        num_units=units,
        inputs={name: torch.from_numpy(np.asarray(array, dtype=np.int64)) for name, array in inputs.items()},
    )
