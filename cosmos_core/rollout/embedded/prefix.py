"""Prompts that neighbouring slots share: products with their keys and values, read once.

Shape legend: n decoding sequences, m of them that share a prefix, S slots, K key-value heads, G query heads of each, D
head dim, C cache capacity, B matrices of Q and T rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import attrs
import torch

_KEYS_FIRST: Final = torch.cpu._is_amx_tile_supported()  # noqa: SLF001 - there is no public name in torch 2.11
"""Whether a CPU's bfloat16 kernel brings its second matrix into another order first: it should be the small one."""
_SHARING_UNITS: Final = 1024
"""Units that slots must save to share: what the products of a run cost besides reading."""


@attrs.frozen(kw_only=True)
class PrefixGroup:
    """Decoding slots `first` to `last - 1`, whose first `num_units` units are the same: read once, from the first slot.

    A long prompt of many samples is most of what a step of them would read; its products with all their queries are
    those of one matrix. Each slot has a copy still: what is in it may lose its neighbours, and then stands alone.
    """

    first: int
    last: int
    num_units: int = 0

    def pays(self, capacity: int) -> bool:
        """True if that is faster than to read all slots whole: what each has of its own is copied, to lie alone."""
        num = self.last - self.first
        return (num - 1) * self.num_units > 2 * num * (capacity - self.num_units) + _SHARING_UNITS

    def scores(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Products float32 [m K, G, C] of queries [n, K, G, D] with cached keys [S, K, C, D]."""
        queries, keys = queries[self.first : self.last], keys[self.first : self.last]
        size = self.num_units
        if not size:
            return _products(queries.flatten(0, 1), keys.flatten(0, 1))
        num, num_shared, group, _ = queries.shape
        common = _products(queries.transpose(0, 1).flatten(1, 2), keys[0, :, :size])
        common = common.view(num_shared, num, group, size).transpose(0, 1).flatten(0, 1)
        own = _products(queries.flatten(0, 1), keys[:, :, size:].flatten(0, 1))
        return torch.cat([common, own], -1)

    def sums(self, weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Sums [m K, G, D] of cached values [S, K, C, D] with weights [m K, G, C]."""
        values, size = values[self.first : self.last], self.num_units
        if not size:
            return torch.bmm(weights, values.flatten(0, 1))
        (num, num_shared), (_, group, capacity) = values.shape[:2], weights.shape
        by_head = weights.view(num, num_shared, group, capacity)[..., :size].transpose(0, 1).flatten(1, 2)
        common = torch.bmm(by_head, values[0, :, :size])
        common = common.view(num_shared, num, group, -1).transpose(0, 1).flatten(0, 1)
        return torch.baddbmm(common, weights[..., size:], values[:, :, size:].flatten(0, 1))


def prefix_groups(num: int, shared: tuple[PrefixGroup, ...], capacity: int) -> Iterator[PrefixGroup]:
    """Slots 0 to `num - 1` in runs: those that share, where it pays, and what is between them."""
    at = 0
    for run in shared:
        if not run.pays(capacity):
            continue
        if run.first > at:
            yield PrefixGroup(first=at, last=run.first)
        yield run
        at = run.last
    if at < num:
        yield PrefixGroup(first=at, last=num)


def _products(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """float32 [B, Q, T] of queries [B, Q, D], few, with keys [B, T, D], many."""
    if _KEYS_FIRST and queries.device.type == "cpu" and queries.dtype is torch.bfloat16:
        products = torch.bmm(keys, queries.transpose(1, 2)).transpose(1, 2)
    else:
        products = torch.bmm(queries, keys.transpose(1, 2))
    return products.to(torch.float32, memory_format=torch.contiguous_format)
