"""Attention over packed tokens and slots.

Shape legend: N tokens of the step, n decoding sequences (the first n tokens, one each), S slots, H query heads, K
key-value heads, G = H / K, D head dim, C cache capacity, P padded chunks, Q their longest.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import attrs
import torch
from torch.nn.functional import scaled_dot_product_attention

from cosmos_core.rollout.embedded.cache import SlotCache
from cosmos_core.rollout.embedded.interface import AttentionModule, Variant
from cosmos_core.rollout.embedded.plan import Chunk, Fork
from cosmos_core.rollout.embedded.prefix import PrefixGroup, prefix_groups

_LONG_CHUNK: Final = 512
"""Pieces above this length are never padded together with others."""


class SlotStep:
    """A step over slots: tokens 0 to n - 1 decode in slots 0 to n - 1, the rest are chunks of prompts."""

    def __init__(
        self,
        cache: SlotCache | None,
        *,
        slots_N: torch.Tensor,
        places_N: torch.Tensor,
        chunks: tuple[Chunk, ...] = (),
        forks: tuple[Fork, ...] = (),
        shared: tuple[PrefixGroup, ...] = (),
    ) -> None:
        self._cache = cache
        self._slots_N = slots_N
        self._places_N = places_N
        self._num_decoding = num_decoding = chunks[0].first if chunks else len(slots_N)
        self._forks = forks
        self._prefix_groups = () if cache is None else tuple(prefix_groups(num_decoding, shared, cache.capacity))
        self._packs = tuple(_packs(chunks, slots_N.device))
        self._masks: dict[tuple[int, int | None], torch.Tensor] = {}
        self._rows_by_heads: dict[int, torch.Tensor] = {}

    @classmethod
    def alone(cls, size: int, device: torch.device) -> SlotStep:
        """One sequence of `size` units from its beginning, without a cache."""
        places_N = torch.arange(size, device=device)
        return cls(
            None,
            slots_N=torch.zeros_like(places_N),
            places_N=places_N,
            chunks=(Chunk(first=0, last=size, start=0, slot=0),),
        )

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
        cached = self._write(module.layer_idx, keys, values) if self._cache is not None else None
        num_decoding = self._num_decoding
        if not self._packs and cached is not None:
            return self._decode(queries, *cached, variant)
        out = values.new_empty(queries.shape[1], queries.shape[0], values.shape[-1])
        if num_decoding and cached is not None:
            out[:num_decoding] = self._decode(queries[:, :num_decoding], *cached, variant)
        for pack in self._packs:
            pack.attend(out, queries=queries, keys=keys, values=values, cached=cached, variant=variant)
        return out

    def _write(self, layer: Any, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        assert self._cache is not None
        cached_keys, cached_values = self._cache.layers[layer]
        rows = self._rows(*cached_keys.shape[1:3])
        for cached, new in ((cached_keys, keys), (cached_values, values)):
            dim = new.shape[-1]
            cached.view(-1, dim)[rows] = new.transpose(0, 1).reshape(-1, dim)
        for fork in self._forks:
            size = fork.num_units
            for target in fork.targets:
                cached_keys[target, :, :size] = cached_keys[fork.source, :, :size]
                cached_values[target, :, :size] = cached_values[fork.source, :, :size]
        return cached_keys, cached_values

    def _rows(self, num_shared: int, capacity: int) -> torch.Tensor:
        """Rows of new units, int64 [N K], in a cache whose slots, heads and units are one dim; made once a step."""
        rows = self._rows_by_heads.get(num_shared)
        if rows is None:
            heads_K = torch.arange(num_shared, device=self._slots_N.device)
            rows = ((self._slots_N[:, None] * num_shared + heads_K) * capacity + self._places_N[:, None]).flatten()
            self._rows_by_heads[num_shared] = rows
        return rows

    def _decode(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, variant: Variant
    ) -> torch.Tensor:
        """One new unit a slot: the G query heads of a key-value head become rows of one small matrix product."""
        num_heads, num, dim = queries.shape
        num_shared, capacity = keys.shape[1:3]
        grouped = queries.transpose(0, 1).reshape(num, num_shared, -1, dim)
        scores, scaling = _joined([run.scores(grouped, keys) for run in self._prefix_groups]), variant.scaling
        if variant.softcap is not None:
            scores, scaling = scores.mul_(scaling / variant.softcap).tanh_(), variant.softcap
        scores = torch.add(self._mask(num_shared, capacity, variant.window), scores, alpha=scaling, out=scores)
        sinks = None if variant.sinks_H is None else variant.sinks_H.view(num_shared, -1).repeat(num, 1)
        weights = _softmax(scores, sinks).to(values.dtype)
        parts = torch.split(weights, [(run.last - run.first) * num_shared for run in self._prefix_groups])
        sums = [run.sums(part, values) for run, part in zip(self._prefix_groups, parts, strict=True)]
        return _joined(sums).view(num, num_heads, -1)

    def _mask(self, num_shared: int, capacity: int, window: int | None) -> torch.Tensor:
        """0 where a decoding sequence may look, else minus infinity: float32 [n K, 1, C]; made once a step."""
        mask = self._masks.get((num_shared, window))
        if mask is None:
            places_C = torch.arange(capacity, device=self._places_N.device)
            here_n1 = self._places_N[: self._num_decoding, None]
            hidden = places_C > here_n1
            if window is not None:
                hidden |= places_C <= here_n1 - window
            mask = torch.zeros(hidden.shape, device=hidden.device).masked_fill_(hidden, -torch.inf)
            mask = mask[:, None].expand(-1, num_shared, -1).reshape(-1, 1, capacity)
            self._masks[num_shared, window] = mask
        return mask


@attrs.frozen(kw_only=True, eq=False)
class _Pack:
    """Pieces attended together: one as it lies, which is the chunk, or several of like length, padded.

    Of each padded place, `padded_PQ` is the token, and `real_PQ` tells whether it is one.
    """

    chunk: Chunk | None = None
    padded_PQ: torch.Tensor | None = None
    real_PQ: torch.Tensor | None = None

    def attend(
        self,
        out: torch.Tensor,
        *,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        cached: tuple[torch.Tensor, torch.Tensor] | None,
        variant: Variant,
    ) -> None:
        """Fill the rows of `out` [N, H, D] that are the tokens of these chunks."""
        if self.chunk is not None:
            first, last, start = self.chunk.first, self.chunk.last, self.chunk.start
            keys, values = keys[:, first:last], values[:, first:last]
            if start:
                assert cached is not None
                total = start + last - first
                keys = cached[0][self.chunk.slot, :, :total]
                values = cached[1][self.chunk.slot, :, :total]
            attended = _causal(queries[None, :, first:last], keys[None], values[None], start, variant)
            out[first:last] = attended[0].transpose(0, 1)
            return
        assert self.padded_PQ is not None
        assert self.real_PQ is not None
        q, k, v = (part[:, self.padded_PQ].transpose(0, 1) for part in (queries, keys, values))
        attended = _causal(q, k, v, 0, variant)
        out[self.padded_PQ[self.real_PQ]] = attended.transpose(1, 2)[self.real_PQ]


def _packs(chunks: tuple[Chunk, ...], device: torch.device) -> Iterator[_Pack]:
    """Group chunks that start their sequence by length (up to the next power of two), so that little is padding."""
    alike: dict[int, list[Chunk]] = {}
    for chunk in chunks:
        size = chunk.last - chunk.first
        if chunk.start or size > _LONG_CHUNK:
            yield _Pack(chunk=chunk)
        else:
            alike.setdefault(size.bit_length(), []).append(chunk)
    for group in alike.values():
        if len(group) == 1:
            yield _Pack(chunk=group[0])
            continue
        first_P1 = torch.tensor([[chunk.first] for chunk in group], device=device)
        last_P1 = torch.tensor([[chunk.last] for chunk in group], device=device)
        places_PQ = first_P1 + torch.arange(max(chunk.last - chunk.first for chunk in group), device=device)
        yield _Pack(padded_PQ=places_PQ.minimum(last_P1 - 1), real_PQ=places_PQ < last_P1)


def _causal(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, start: int, variant: Variant
) -> torch.Tensor:
    """Causal attention of queries [P, H, Q, D] at units `start`, …, over keys and values [P, K, T, D]."""
    shared = queries.shape[1] // keys.shape[1]
    if shared > 1:
        keys, values = keys.repeat_interleave(shared, 1), values.repeat_interleave(shared, 1)
    size, total = queries.shape[2], keys.shape[2]
    plain = variant.softcap is None and variant.sinks_H is None
    if plain and not start and (variant.window is None or variant.window >= total):
        return scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=variant.scaling)
    here_Q1 = torch.arange(start, start + size, device=queries.device)[:, None]
    there_T = torch.arange(total, device=queries.device)
    visible_QT = there_T <= here_Q1
    if variant.window is not None:
        visible_QT &= there_T > here_Q1 - variant.window
    if plain:
        return scaled_dot_product_attention(queries, keys, values, attn_mask=visible_QT, scale=variant.scaling)
    scores = torch.matmul(queries, keys.transpose(2, 3)) * variant.scaling
    if variant.softcap is not None:
        scores = torch.tanh(scores / variant.softcap) * variant.softcap
    scores = scores.masked_fill(~visible_QT, -torch.inf)
    sinks = None if variant.sinks_H is None else variant.sinks_H[:, None].expand(scores.shape[:3])
    return torch.matmul(_softmax(scores, sinks).to(values.dtype), values)


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _softmax(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Softmax over the last dim in float32; a sink per row takes its share of the mass and gives nothing."""
    if sinks is None:
        return torch.softmax(scores, -1, dtype=torch.float32)
    extended = torch.cat([scores, sinks.to(scores.dtype)[..., None]], -1)
    return torch.softmax(extended, -1, dtype=torch.float32)[..., :-1]
