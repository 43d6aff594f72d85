"""What one process evaluates of a micro-batch: its slice of the row, and the decisions in it.

Shape legend: R units of the row, U of this process's slice, N decisions of the micro-batch, n of them in the slice.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import attrs
import torch

from cosmos_core.models.attention.documents import ContextSlice, Packing
from cosmos_core.models.parallel.collectives import gather_for_shared
from cosmos_core.models.parallel.rooted import layout_of
from cosmos_core.protocols import Layout, MicroBatch

EMBEDDINGS: Final = "inputs_embeds"
"""What backbones call the embeddings that they are given."""


def device_of(module: torch.nn.Module) -> torch.device:
    """Where a module computes: not where its parameters are, when they wait in the CPU's memory."""
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
        """Of values [N, ...] of the micro-batch's decisions, those of this slice."""
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
        """Count the decisions of each slice.

        Args:
            decisions_N: int64 [N] on the CPU, places in the row.
            num_units: Of a slice.
            context: This process's slice.
            device: Of the result.
        """
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
