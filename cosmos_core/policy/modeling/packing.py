"""Sequences of different lengths side by side in one row, without padding.

Shape legend: U units of the row, S sequences of it, N decisions of it.

A sequence of P prompt and N completion tokens takes P + N - 1 places: its last token predicts nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from cosmos_core.errors import DataError
from cosmos_core.policy.modeling.tokens import values
from cosmos_core.protocols import MicroBatch
from cosmos_core.types import Payload


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


def pack(payloads: Sequence[Payload], *, budget: int) -> list[MicroBatch]:
    """Pack token payloads into micro-batches of at most `budget` units, every payload exactly once.

    `inputs` of a micro-batch: `tokens` and `positions` int64 [U], `lengths` int64 [S], `decisions` int64 [N] (the
    place in U whose output predicts each completion token) and `targets` int64 [N].

    Raises:
        DataError: A payload is no token payload, has an empty prompt, or alone exceeds the budget.
    """
    prompts = [values(payload, "prompt") for payload in payloads]
    completions = [values(payload, "completion") for payload in payloads]
    for index, prompt in enumerate(prompts):
        if not len(prompt):
            raise DataError(f"payload {index} has an empty prompt: the first completion token has nothing to follow")
    lengths = [max(len(p) + len(c) - 1, 1) for p, c in zip(prompts, completions, strict=True)]
    return [_lay_out(members, prompts, completions, lengths) for members in fill_bins(lengths, budget)]


def _lay_out(
    members: list[int], prompts: Sequence[np.ndarray], completions: Sequence[np.ndarray], lengths: Sequence[int]
) -> MicroBatch:
    sizes = [lengths[i] for i in members]
    starts = np.cumsum([0, *sizes])
    tokens = np.concatenate([np.concatenate((prompts[i], completions[i]))[: lengths[i]] for i in members])
    decisions = np.concatenate(
        [
            np.arange(len(completions[i])) + (start + len(prompts[i]) - 1)
            for i, start in zip(members, starts[:-1], strict=True)
        ]
    )
    inputs = {
        "tokens": tokens,
        "positions": np.concatenate([np.arange(size) for size in sizes]),
        "lengths": np.asarray(sizes),
        "decisions": decisions,
        "targets": np.concatenate([completions[i] for i in members]),
    }
    return MicroBatch(
        sequences=tuple(members),
        num_decisions=tuple(len(completions[i]) for i in members),
        num_units=int(starts[-1]),
        inputs={name: torch.from_numpy(np.asarray(array, dtype=np.int64)) for name, array in inputs.items()},
    )
