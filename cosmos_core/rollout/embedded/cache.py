"""The KV cache: one dense row (slot) per sequence in flight, for every layer.

Shape legend: S slots, H key-value heads, C capacity in units, D head dim (keys and values may differ).
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterable, Mapping, Sequence

import attrs
import torch

from cosmos_core.rollout.embedded.plan import Plan


@attrs.frozen(kw_only=True)
class LayerShape:
    """Shape of what one layer caches of a unit."""

    num_heads: int
    key_dim: int
    value_dim: int


class SlotCache:
    """Keys and values [S, H, C, D] of each layer.

    Sequences that decode occupy slots 0 to n - 1, so the first n rows are one block of memory and attention needs no
    gather; the capacity follows the longest sequence in flight, so that their whole width is used.

    Memory is held for the largest capacity so far and laid out anew for each: asking for it whenever the longest
    sequence changes would cost more than copying what is in it.
    """

    page = 1

    def __init__(
        self, shapes: Mapping[int, LayerShape], *, num_slots: int, step: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._step = step
        self._room = self.capacity = step
        empty = torch.empty(0, dtype=dtype, device=device)
        self._blocks = {
            layer: (
                _Block(empty, num_slots, shape.num_heads, shape.key_dim),
                _Block(empty, num_slots, shape.num_heads, shape.value_dim),
            )
            for layer, shape in shapes.items()
        }
        self._lay_out(0, 0, grows=True)

    def fit(self, num_units: int, num_used: int, *, longest: int) -> None:
        """Make room in each slot, and keep what the first `num_used` hold.

        With nothing to keep, the capacity is what `num_units` needs and nothing else: it may decide how a product
        rounds, and a batch must not come out differently for what an earlier one was like. Else memory is asked for up
        to `longest`, rounded up to a step.
        """
        capacity = -(-num_units // self._step) * self._step
        if capacity <= self.capacity <= (2 * capacity if num_used else capacity):
            return
        num_kept = min(capacity, self.capacity)
        grows = capacity > self._room
        if grows:
            # By half, if it may come to need that, so that a sequence does not ask for memory all the way to its end.
            most = -(-longest // self._step) * self._step
            self._room = max(capacity, min(most, (self._room + self._room // 2) // self._step * self._step))
        self.capacity = capacity
        self._lay_out(num_used, num_kept, grows=grows)

    def prepare(self, plan: Plan) -> None:
        """Make room for a step's units, and copy what is kept to the slots that start from it."""
        self.fit(max(plan.lengths), len(plan.lengths) if plan.uses_cache else 0, longest=plan.longest)
        for slot, kept in plan.resumed:
            for block, units in zip(itertools.chain(*self.layers.values()), kept.held, strict=True):
                block[slot, :, : kept.num_units] = units

    def size_of(self, num_units: int) -> int:
        """Units of memory that so many units take where they are kept."""
        return num_units

    def room(self, lengths: Iterable[int]) -> int:  # noqa: ARG002
        """Units of memory that are left beside slots of such lengths: it has no bound."""
        return sys.maxsize

    def keep(self, slot: int, num_units: int) -> list[torch.Tensor]:
        """A copy of the first units of a slot: they lie outside of all slots."""
        return [block[slot, :, :num_units].clone() for block in itertools.chain(*self.layers.values())]

    def drop(self, held: list[torch.Tensor]) -> None:
        """Keep no longer what `keep` gave."""

    def release(self, first: int) -> None:
        """Hold nothing in slots from `first` on: what is in them is written over."""

    def clear(self) -> None:
        """Hold nothing, in no memory."""
        self._room = self.capacity = 0
        self._lay_out(0, 0, grows=True)

    def _lay_out(self, num_used: int, num_kept: int, *, grows: bool) -> None:
        # What is kept is copied to other memory: that which the block before it has just left.
        spare: dict[int, torch.Tensor] = {}
        for keys, values in self._blocks.values():
            for block in (keys, values):
                if grows:
                    block.move_to(block.zeros(self._room), self.capacity, num_used, num_kept)
                elif num_used:
                    size = block.memory.numel()
                    target = spare.pop(size) if size in spare else torch.zeros_like(block.memory)
                    spare[size] = block.move_to(target, self.capacity, num_used, num_kept)
                else:
                    block.move_to(block.memory, self.capacity, 0, 0)
        self.layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {
            layer: (keys.view, values.view) for layer, (keys, values) in self._blocks.items()
        }

    def move(self, sources: Sequence[int], targets: Sequence[int], num_units: int) -> None:
        """Copy the first `num_units` units, at most, of some slots to others."""
        num_units = min(num_units, self.capacity)
        device = next(iter(self.layers.values()))[0].device
        source = torch.tensor(sources, device=device)
        target = torch.tensor(targets, device=device)
        for layer in self.layers.values():
            for block in layer:
                block[target, :, :num_units] = block[source, :, :num_units]


class _Block:
    """The keys or the values of a layer: memory, and a view [S, H, C, D] of its beginning for the capacity."""

    def __init__(self, empty: torch.Tensor, num_slots: int, num_heads: int, dim: int) -> None:
        self._num_slots = num_slots
        self._num_heads = num_heads
        self._dim = dim
        self.memory = empty
        self.view = empty.view(num_slots, num_heads, 0, dim)

    def zeros(self, capacity: int) -> torch.Tensor:
        """Memory for a capacity. Zeros: units that are not there are masked, but no mask takes NaN away."""
        return self.memory.new_zeros(self._num_slots * self._num_heads * capacity * self._dim)

    def move_to(self, memory: torch.Tensor, capacity: int, num_used: int, num_kept: int) -> torch.Tensor:
        """Lie in other memory, with `num_kept` units of the first `num_used` slots; returns the memory that it left."""
        left, old = self.memory, self.view
        shape = (self._num_slots, self._num_heads, capacity, self._dim)
        self.memory, self.view = memory, memory[: math.prod(shape)].view(shape)
        if num_used:
            self.view[:num_used, :, :num_kept] = old[:num_used, :, :num_kept]
        return left
