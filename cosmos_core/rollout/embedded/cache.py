"""The KV cache: one dense row (slot) per sequence in flight, for every layer.

Shape legend: S slots, H key-value heads, C capacity in units, D head dim (keys and values may differ).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
import torch


@attrs.frozen(kw_only=True)
class LayerShape:
    """What one layer caches of a unit."""

    num_heads: int
    key_dim: int
    value_dim: int


class SlotCache:
    """Keys [S, H, D, C] and values [S, H, C, D] of each layer.

    Sequences that decode occupy slots 0 to n - 1, so the first n rows are one block of memory and attention needs no
    gather; the capacity follows the longest sequence in flight, so that their whole width is used. Keys lie as the
    product with the queries reads them, which halves its time on a CPU.
    """

    def __init__(
        self, shapes: Mapping[int, LayerShape], *, num_slots: int, step: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._step = step
        self.capacity = step
        self.layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {
            layer: (
                torch.zeros(num_slots, shape.num_heads, shape.key_dim, step, dtype=dtype, device=device),
                torch.zeros(num_slots, shape.num_heads, step, shape.value_dim, dtype=dtype, device=device),
            )
            for layer, shape in shapes.items()
        }

    def fit(self, num_units: int, num_used: int) -> None:
        """Make room for `num_units` in each slot, keeping what the first `num_used` slots hold.

        With nothing to keep, the capacity is what `num_units` needs and nothing else: it may decide how a product
        rounds, and a batch must not come out differently for what an earlier one was like.
        """
        capacity = -(-num_units // self._step) * self._step
        if capacity <= self.capacity <= (2 * capacity if num_used else capacity):
            return
        kept = min(capacity, self.capacity)
        for layer, (keys, values) in self.layers.items():
            larger_keys = keys.new_zeros(*keys.shape[:3], capacity)
            larger_keys[:num_used, :, :, :kept] = keys[:num_used, :, :, :kept]
            larger_values = values.new_zeros(*values.shape[:2], capacity, values.shape[3])
            larger_values[:num_used, :, :kept] = values[:num_used, :, :kept]
            self.layers[layer] = (larger_keys, larger_values)
        self.capacity = capacity

    def move(self, sources: Sequence[int], targets: Sequence[int], num_units: int) -> None:
        """Copy the first `num_units` units of some slots to others."""
        device = next(iter(self.layers.values()))[0].device
        source = torch.tensor(sources, device=device)
        target = torch.tensor(targets, device=device)
        for keys, values in self.layers.values():
            keys[target, :, :, :num_units] = keys[source, :, :, :num_units]
            values[target, :, :num_units] = values[source, :, :num_units]
