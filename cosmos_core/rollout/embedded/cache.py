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
    """Keys and values [S, H, C, D] of each layer.

    Sequences that decode occupy slots 0 to n - 1, so the first n rows are one block of memory and attention needs no
    gather; the capacity follows the longest sequence in flight, so that their whole width is used.
    """

    def __init__(
        self, shapes: Mapping[int, LayerShape], *, num_slots: int, step: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._step = step
        self.capacity = step
        self.layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {
            layer: (
                torch.zeros(num_slots, shape.num_heads, step, shape.key_dim, dtype=dtype, device=device),
                torch.zeros(num_slots, shape.num_heads, step, shape.value_dim, dtype=dtype, device=device),
            )
            for layer, shape in shapes.items()
        }

    def fit(self, num_units: int, num_used: int) -> None:
        """Make room for `num_units` in each slot, keeping what the first `num_used` slots hold."""
        capacity = -(-num_units // self._step) * self._step
        if capacity <= self.capacity <= 2 * capacity:
            return
        kept = min(capacity, self.capacity)
        for layer, (keys, values) in self.layers.items():
            self.layers[layer] = (_resized(keys, capacity, kept, num_used), _resized(values, capacity, kept, num_used))
        self.capacity = capacity

    def move(self, sources: Sequence[int], targets: Sequence[int], num_units: int) -> None:
        """Copy the first `num_units` units of some slots to others."""
        device = next(iter(self.layers.values()))[0].device
        source = torch.tensor(sources, device=device)
        target = torch.tensor(targets, device=device)
        for keys, values in self.layers.values():
            keys[target, :, :num_units] = keys[source, :, :num_units]
            values[target, :, :num_units] = values[source, :, :num_units]


def _resized(cached: torch.Tensor, capacity: int, kept: int, num_used: int) -> torch.Tensor:
    resized = cached.new_zeros(cached.shape[0], cached.shape[1], capacity, cached.shape[3])
    resized[:num_used, :, :kept] = cached[:num_used, :, :kept]
    return resized
