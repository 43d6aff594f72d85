"""Packed rows: sequences of different lengths side by side, and one process's slice of them.

A sequence of P prompt and C completion tokens takes P + C - 1 places: its last token predicts nothing. What an
environment wrote of the completion conditions, and is no decision. Padding, if a layout needs it, is a document apart.

Shape legend: R units of the row, U of this process's slice, N decisions of the micro-batch, n of them in the slice;
P prompt and C completion units of a sequence.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

import attrs
import numpy as np
import torch

from cosmos_core.errors import DataError
from cosmos_core.models.attention.documents import ContextSlice, Packing
from cosmos_core.models.parallel.collectives import gather_for_shared
from cosmos_core.models.parallel.forwards import layout_of
from cosmos_core.models.tokens import decided, values
from cosmos_core.protocols import Layout, MicroBatch
from cosmos_core.types import Payload

PAD_TOKEN: Final = 0
"""What fills a row up: any token will do, for a document of its own that decides nothing changes nothing."""
UNIFORM_STEPS: Final = 8
"""Rows of one size come in at most about this many sizes, so that a pipeline rarely meets a new shape."""


def fill_bins(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """First fit, longest first: indices of `lengths` in bins that sum to at most `capacity`.

    Deterministic; each bin is in descending order of length, so that equal lengths are neighbours.
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


def pack(
    payloads: Sequence[Payload], *, budget: int, multiple: int = 1, is_uniform: bool = False, is_alone: bool = False
) -> list[MicroBatch]:
    """Pack token payloads into micro-batches of at most `budget` units, every payload exactly once.

    `inputs` of a micro-batch: `tokens` and `positions` int64 [U], `lengths` int64 [S] (one more where the row is
    padded: the padding is the last document), `decisions` int64 [N] (the place in U whose output predicts each
    completion token) and `targets` int64 [N].

    Args:
        payloads: What to pack.
        budget: Most units of a micro-batch, before it is padded.
        multiple: Units of each micro-batch are padded to a multiple of it.
        is_uniform: Whether all are padded to one size, of a few that the budget allows.
        is_alone: Whether each payload is a micro-batch of its own.

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
    if is_alone:
        bins = [[index] for members in bins for index in members]
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


EMBEDDINGS: Final = "inputs_embeds"
"""What backbones call the embeddings that they are given."""


def device_of(module: torch.nn.Module) -> torch.device:
    """The device on which a module computes: its parameters may wait elsewhere, in the CPU's memory."""
    layout = layout_of(module)
    if layout is not None and layout.cpu_offload and layout.mesh.world_size > 1:
        return torch.device(layout.mesh.weights.device_type)
    return next(module.parameters()).device


@attrs.frozen(kw_only=True, eq=False)
class Row:
    """A micro-batch on this process's device.

    Attributes:
        tokens_U: int64 [U].
        positions_U: int64 [..., U]: one position a unit, or one for each of several rotary axes.
        packing: The documents of the row, and the slice.
        decisions_n: int64 [n], places in the slice.
        targets_n: int64 [n].
        inputs: All inputs of the micro-batch, whole.
        batch: The micro-batch.
        shared: Where each decision is among those of all slices; None where this process has the row.
    """

    tokens_U: torch.Tensor
    positions_U: torch.Tensor
    packing: Packing
    decisions_n: torch.Tensor
    targets_n: torch.Tensor
    inputs: Mapping[str, torch.Tensor]
    batch: MicroBatch
    shared: Shared | None

    @staticmethod
    def of(batch: MicroBatch, device: torch.device, layout: Layout | None) -> Row:
        """This process's part of a micro-batch."""
        context = ContextSlice.of(layout)
        packing = Packing.of(batch.inputs["lengths"].tolist(), device, context=context)
        inputs = {name: tensor.to(device, non_blocking=True) for name, tensor in batch.inputs.items()}
        start, stop = packing.bounds
        decisions, targets, shared = inputs["decisions"], inputs["targets"], None
        if context is not None:
            shared = Shared.of(batch.inputs["decisions"], stop - start, context, device)
            decisions, targets = decisions[shared.own_n] - start, targets[shared.own_n]
        return Row(
            tokens_U=inputs["tokens"][start:stop],
            positions_U=inputs["positions"][..., start:stop],
            packing=packing,
            decisions_n=decisions,
            targets_n=targets,
            inputs=inputs,
            batch=batch,
            shared=shared,
        )

    def own(self, values_N: torch.Tensor) -> torch.Tensor:
        """Select the values of this slice from those of the micro-batch's decisions [N, ...]."""
        return values_N if self.shared is None else values_N.index_select(0, self.shared.own_n)

    def whole(self, values_n: torch.Tensor) -> torch.Tensor:
        """The values [N, ...] of all decisions of the micro-batch, from those of all slices.

        Every process is given the same, and computes the same loss from it: its own part of the gradient is whole.
        """
        return values_n if self.shared is None else self.shared.whole(values_n)


@attrs.frozen(kw_only=True, eq=False)
class Shared:
    """Decisions spread over slices.

    Attributes:
        context: This process's slice.
        own_n: int64 [n], the decisions that are in it.
        most: The largest n of all slices.
        places_N: int64 [N], where each is when `most` of each slice are joined.
    """

    context: ContextSlice
    own_n: torch.Tensor
    most: int
    places_N: torch.Tensor

    @staticmethod
    def of(decisions_N: torch.Tensor, num_units: int, context: ContextSlice, device: torch.device) -> Shared:
        """Count the decisions, int64 [N] places in the row on the CPU, of each slice of so many units."""
        slices_N = torch.div(decisions_N, num_units, rounding_mode="floor")
        held_PN = slices_N == torch.arange(context.size)[:, None]
        most = int(held_PN.sum(1).max()) if len(decisions_N) else 0
        among_N = (held_PN.cumsum(1) - 1).gather(0, slices_N[None])[0]
        return Shared(
            context=context,
            own_n=held_PN[context.place].nonzero()[:, 0].to(device),
            most=most,
            places_N=(slices_N * most + among_N).to(device),
        )

    def whole(self, values_n: torch.Tensor) -> torch.Tensor:
        """See `Row.whole`."""
        padding = (0, 0) * (values_n.dim() - 1) + (0, self.most - len(values_n))
        padded = torch.nn.functional.pad(values_n, padding)
        return gather_for_shared(padded, 0, self.context.group).index_select(0, self.places_N)
