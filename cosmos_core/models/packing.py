"""Sequences of different lengths side by side in one row; padding, where a layout needs it, is a document apart.

Shape legend: U units of the row, N decisions of it; P prompt and C completion units of a sequence.

A sequence of P prompt and C completion tokens takes P + C - 1 places: its last token predicts nothing. Of the
completion, what an environment wrote conditions, and is no decision.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import attrs
import numpy as np
import torch

from cosmos_core.errors import DataError
from cosmos_core.models.tokens import decided, values
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
        DataError: A payload is no token payload, has an empty prompt, does not say of each unit whether it was
            decided, or alone exceeds the budget.
    """
    sequences = [_Sequence.of(payload) for payload in payloads]
    for index, sequence in enumerate(sequences):
        if not len(sequence.prompt_P):
            raise DataError(f"payload {index} has an empty prompt: the first completion token has nothing to follow")
    lengths = [sequence.num_units for sequence in sequences]
    bins = fill_bins(lengths, budget)
    sizes = padded_sizes([sum(lengths[i] for i in members) for members in bins], budget, multiple, is_uniform)
    return [_lay_out(members, sequences, size) for members, size in zip(bins, sizes, strict=True)]


@attrs.frozen(kw_only=True, eq=False)
class _Sequence:
    """A payload, as arrays; `decisions_N` are places in the completion."""

    prompt_P: np.ndarray
    completion_C: np.ndarray
    decisions_N: np.ndarray

    @staticmethod
    def of(payload: Payload) -> _Sequence:
        return _Sequence(
            prompt_P=values(payload, "prompt"),
            completion_C=values(payload, "completion"),
            decisions_N=np.flatnonzero(decided(payload)),
        )

    @property
    def num_units(self) -> int:
        """Places that it takes."""
        return max(len(self.prompt_P) + len(self.completion_C) - 1, 1)


def padded_sizes(sizes: Sequence[int], budget: int, multiple: int, is_uniform: bool) -> list[int]:
    """Units of each row after padding (see `pack`)."""
    if not is_uniform:
        return [_round_up(size, multiple) for size in sizes]
    step = _round_up(max(1, budget // UNIFORM_STEPS), multiple)
    return [_round_up(max(sizes, default=0), step)] * len(sizes)


def _round_up(number: int, multiple: int) -> int:
    return math.ceil(number / multiple) * multiple


def _lay_out(members: list[int], sequences: Sequence[_Sequence], units: int) -> MicroBatch:
    packed = [sequences[index] for index in members]
    sizes = [sequence.num_units for sequence in packed]
    starts = np.cumsum([0, *sizes])
    padding = units - int(starts[-1])
    tokens = [np.concatenate((each.prompt_P, each.completion_C))[: each.num_units] for each in packed]
    decisions = [
        each.decisions_N + (start + len(each.prompt_P) - 1) for each, start in zip(packed, starts[:-1], strict=True)
    ]
    documents = [*sizes, padding] if padding else sizes
    inputs = {
        "tokens": np.concatenate([*tokens, np.full(padding, PAD_TOKEN)]),
        "positions": np.concatenate([np.arange(size) for size in documents]),
        "lengths": np.asarray(documents),
        "decisions": np.concatenate(decisions),
        "targets": np.concatenate([each.completion_C[each.decisions_N] for each in packed]),
    }
    return MicroBatch(
        sequences=tuple(members),
        num_decisions=tuple(len(each.decisions_N) for each in packed),
        num_units=units,
        inputs={name: torch.from_numpy(np.asarray(array, dtype=np.int64)) for name, array in inputs.items()},
    )
