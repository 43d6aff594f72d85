"""The KV cache in pages, and attention that reads them by FlashAttention (CUDA, 16 bits).

Shape legend: N tokens of the step, B sequences in it, S slots, W pages of a slot at most, P units of a page, H query
heads, K key-value heads, D head dim; R rows of a cache whose pages and units are one dim.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from cosmos_core.models.attention import varlen
from cosmos_core.rollout.embedded.attention import SlotStep
from cosmos_core.rollout.embedded.cache import LayerShape, SlotCache
from cosmos_core.rollout.embedded.interface import AttentionModule, Call, Variant
from cosmos_core.rollout.embedded.plan import Chunk, Fork, Plan


def dense_because(calls: Iterable[Call], dtype: torch.dtype, device: torch.device) -> str:
    """Say why a model's layers need a dense cache; empty if a cache in pages does."""
    for call in calls:
        variant, shape = call.variant, call.shape
        refusal = varlen.refusal_of_pages(dtype, device, shape.key_dim, shape.value_dim)
        if refusal or variant.softcap is not None or variant.sinks_H is not None:
            return refusal or f"layers attend with {'sinks' if variant.softcap is None else 'soft caps'}"
    return ""


def cache_for(
    calls: Mapping[int, Call],
    dtype: torch.dtype,
    device: torch.device,
    *,
    num_slots: int,
    step: int,
    longest: int,
    most_bytes: int | None = None,
) -> SlotCache | PagedCache:
    """The cache that a model's layers and the device can have: in pages if possible, of so many bytes at most."""
    shapes = {layer: call.shape for layer, call in calls.items()}
    if dense_because(calls.values(), dtype, device):
        return SlotCache(shapes, num_slots=num_slots, step=step, dtype=dtype, device=device)
    sizes = {"num_slots": num_slots, "longest": longest}
    return PagedCache(shapes, dtype=dtype, device=device, most_bytes=most_bytes, **sizes)


def step_over(
    cache: SlotCache | PagedCache, plan: Plan, slots_N: torch.Tensor, places_N: torch.Tensor
) -> SlotStep | PagedStep:
    """A planned step over a cache of either kind: the slot and the place of each token."""
    if isinstance(cache, PagedCache):
        return PagedStep(cache, slots_N=slots_N, places_N=places_N, chunks=plan.chunks, forks=plan.forks)
    return SlotStep(cache, slots_N=slots_N, places_N=places_N, chunks=plan.chunks, forks=plan.forks, shared=plan.shared)


class PagedCache:
    """Keys and values [pages, P, K, D] of each layer, and for each slot the pages that hold its units.

    Slots that hold the same units share the pages which these fill. Memory follows need: it grows by half, and only
    `clear` gives it back. Page 0 is nobody's: entries of the table that mean nothing lead there.

    With `most_bytes` there are no more pages than these hold; whoever fills slots asks for `room` before.

    Attributes:
        page: P. Without `varlen.reads_tables` a slot's only page has room for the longest sequence.
        bound: Most pages, with page 0; None: as many as all slots need at their longest.
        layers: Keys and values of each layer.
        table: int32 [S, W]: pages of each slot, on the device; always the same memory.
        generation: Another one once `layers` lie in other memory.
        evict: Gives up pages that are kept for sequences to come, some of them; False if there are none.
    """

    evict: Callable[[], bool] = staticmethod(lambda: False)

    def __init__(
        self,
        shapes: Mapping[int, LayerShape],
        *,
        num_slots: int,
        longest: int,
        dtype: torch.dtype,
        device: torch.device,
        most_bytes: int | None = None,
    ) -> None:
        whole = longest + -longest % varlen.PAGE
        self.page = varlen.PAGE if varlen.reads_tables() else whole
        values = sum(shape.num_heads * (shape.key_dim + shape.value_dim) for shape in shapes.values())
        self.bound = None if most_bytes is None else most_bytes // (values * dtype.itemsize * self.page)
        self._most = 1
        self._held = np.zeros((num_slots, whole // self.page), np.int32)
        self.table = torch.zeros(self._held.shape, dtype=torch.int32, device=device)
        self._pages: list[list[int]] = [[] for _ in range(num_slots)]
        self._is_changed = False
        empty = torch.empty(0, dtype=dtype, device=device)
        self._empty = {
            layer: tuple(empty.view(0, self.page, shape.num_heads, dim) for dim in (shape.key_dim, shape.value_dim))
            for layer, shape in shapes.items()
        }
        self.generation = 0
        self.clear()

    def prepare(self, plan: Plan) -> None:
        """Give slots the pages that they need for a step's units.

        What a chunk begins anew, it begins in pages of its own: others may share those that it had. A fork shares the
        pages which its units fill; the rest of them is copied within the step (`copies`). What is kept of a sequence is
        the slot's that starts from it.
        """
        most = 1 + len(self._pages) * (self.size_of(plan.longest) // self.page)
        self._most = max(self._most, most if self.bound is None else min(most, self.bound))
        for slot, kept in plan.resumed:
            self._append(slot, kept.held)
            self.drop(kept.held)
        for chunk in plan.chunks:
            if not chunk.start:
                self._empty_slot(chunk.slot)
        for fork in plan.forks:
            self._extend([(fork.source, plan.lengths[fork.source])])
            shared = self._pages[fork.source][: fork.num_units // self.page]
            for target in fork.targets:
                self._empty_slot(target)
                self._append(target, shared)
        self._extend(enumerate(plan.lengths))
        if self._is_changed:
            self.table.copy_(torch.from_numpy(self._held), non_blocking=True)
            self._is_changed = False

    def copies(self, forks: Sequence[Fork]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Rows of the units that each fork does not share: int64 [R] at its source, [T, R] at its T targets."""
        for fork in forks:
            whole, rest = divmod(fork.num_units, self.page)
            if rest:
                pages = [self._pages[slot][whole] for slot in (fork.source, *fork.targets)]
                first_T1 = torch.tensor(pages, device=self.table.device)[:, None] * self.page
                rows = first_T1 + torch.arange(rest, device=self.table.device)
                yield rows[0], rows[1:]

    def move(self, sources: Sequence[int], targets: Sequence[int], num_units: int) -> None:  # noqa: ARG002
        """Let some slots have what others have, which hold nothing then."""
        for source, target in zip(sources, targets, strict=True):
            self._empty_slot(target)
            self._pages[source], self._pages[target] = self._pages[target], self._pages[source]
            self._held[[source, target]] = self._held[[target, source]]

    def release(self, first: int) -> None:
        """Hold nothing in slots from `first` on."""
        for slot in range(first, len(self._pages)):
            self._empty_slot(slot)

    def size_of(self, num_units: int) -> int:
        """Units of memory that so many units take: whole pages."""
        return num_units + -num_units % self.page

    def room(self, lengths: Iterable[int]) -> int:
        """Units of memory that are left once slots 0, 1, … have such lengths; below 0 if they cannot all have them.

        What is kept of sequences that ended counts as left: it gives way.
        """
        if self.bound is None:
            return sys.maxsize
        slots = zip(lengths, self._pages, strict=False)
        held = [max(self.size_of(length), self.page * len(pages)) for length, pages in slots]
        num_shared = sum(map(len, self._pages)) - np.count_nonzero(np.bincount(self._held[: len(held)].ravel())[1:])
        return self.page * (self.bound - 1 + int(num_shared)) - sum(held)

    def keep(self, slot: int, num_units: int) -> list[int]:
        """Pages with the first units of a slot, which stay when it has other ones."""
        pages = self._pages[slot][: self.size_of(num_units) // self.page]
        for page in pages:
            self._counts[page] += 1
        return pages

    def drop(self, held: Sequence[int]) -> None:
        """Keep no longer what `keep` gave."""
        for page in held:
            self._counts[page] -= 1
            if not self._counts[page]:
                self._free.append(page)

    def clear(self) -> None:
        """Hold nothing, in no memory."""
        self.release(0)
        self.layers: dict[int, tuple[torch.Tensor, ...]] = dict(self._empty)
        self._free: list[int] = []
        self._counts: list[int] = []
        self.generation += 1

    def _extend(self, slots: Iterable[tuple[int, int]]) -> None:
        """Give slots pages for so many units."""
        lacking = [(slot, self.size_of(length) // self.page - len(self._pages[slot])) for slot, length in slots]
        needed = sum(max(0, number) for _, number in lacking)
        # What is kept has the memory that sequences in flight do not need, and no other.
        while len(self._counts) + needed - len(self._free) > self._most and needed > len(self._free) and self.evict():
            pass
        if needed > len(self._free):
            self._grow(needed - len(self._free))
        for slot, number in lacking:
            if number > 0:
                self._append(slot, [self._free.pop() for _ in range(number)])

    def _grow(self, missing: int) -> None:
        num = len(self._counts)
        first = max(1, num)
        more = max(first + missing, min(num + num // 2, self._most)) - num
        for layer, blocks in self.layers.items():
            # One after another, so that one alone lies in memory twice.
            self.layers[layer] = tuple(torch.cat([old, old.new_zeros(more, *old.shape[1:])]) for old in blocks)
        self._counts.extend([0] * more)
        self._free.extend(reversed(range(first, num + more)))
        self.generation += 1

    def _append(self, slot: int, pages: Sequence[int]) -> None:
        held = self._pages[slot]
        self._held[slot, len(held) : len(held) + len(pages)] = pages
        held.extend(pages)
        self._is_changed = True
        for page in pages:
            self._counts[page] += 1

    def _empty_slot(self, slot: int) -> None:
        self.drop(self._pages[slot])
        self._pages[slot].clear()
        self._held[slot] = 0
        self._is_changed = True


class PagedStep:
    """A step over slots in pages: tokens 0 to n - 1 decode in slots 0 to n - 1, the rest are chunks of prompts."""

    def __init__(
        self,
        cache: PagedCache,
        *,
        slots_N: torch.Tensor,
        places_N: torch.Tensor,
        chunks: Sequence[Chunk] = (),
        forks: Sequence[Fork] = (),
    ) -> None:
        num_decoding = chunks[0].first if chunks else len(slots_N)
        self._layers = cache.layers
        self._rows_N = cache.table[slots_N, places_N // cache.page].long() * cache.page + places_N % cache.page
        self._copies = tuple(cache.copies(forks))
        slots_B, lengths_B = slots_N[:num_decoding], places_N[:num_decoding].to(torch.int32) + 1
        ends = torch.arange(num_decoding + 1, dtype=torch.int32, device=slots_N.device)
        if chunks:
            fed = [(chunk.slot, chunk.start + chunk.last - chunk.first, chunk.last) for chunk in chunks]
            slots_C, lengths_C, ends_C = torch.tensor(fed, dtype=torch.int32).T.to(slots_N.device, non_blocking=True)
            slots_B, lengths_B = torch.cat([slots_B, slots_C]), torch.cat([lengths_B, lengths_C])
            ends = torch.cat([ends, ends_C])
        longest = max([chunk.last - chunk.first for chunk in chunks], default=1)
        self._pages = varlen.Pages(ends, lengths_B, cache.table[slots_B], longest)

    def attend(
        self,
        module: AttentionModule,
        *,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        variant: Variant,
        extras: dict[str, Any],  # noqa: ARG002 - looked at once, at start
    ) -> torch.Tensor:
        """Cache the new units, then attend (`Step.attend`)."""
        layer: Any = module.layer_idx
        cached = self._layers[layer]
        for block, new in zip(cached, (keys, values), strict=True):
            units = block.flatten(0, 1)
            units.index_copy_(0, self._rows_N, new.transpose(0, 1))
            for source_R, target_R in self._copies:
                units[target_R] = units[source_R]
        query_NHD = queries.transpose(0, 1)
        return varlen.from_pages(query_NHD, cached, self._pages, scale=variant.scaling, window=variant.window)
