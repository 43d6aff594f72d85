"""Attention over a row that several processes hold a slice of each (context parallelism).

Each process has one of `cp` equal slices, next to one another, of the units; documents are cut where slices meet.

- `ulysses`: two all-to-all turn slices of units into slices of heads and back; each process then attends over the
  whole row for its heads. Heads must divide; key-value heads fewer than `cp` are repeated. Everything that packed
  attention computes on one process is computed so.
- `gather`: each process is given all keys and values, and attends with its own queries. Any number of heads.
- `ring`: keys and values stay, and each process fetches, slice by slice, those that its first document reaches back
  to, and merges partial softmaxes. For long documents, whose keys would not fit.
- `auto`: `ulysses` where the heads divide, else `gather`.

Causal attention makes later slices of one long document dearer than earlier ones. Under `ulysses` all processes have
equal work; under `ring` the process with the last slice works most. Under `gather` they compute one another's queries
where that evens it out (`Swap`): each slice is two halves, and of the 2P halves of a row the process `i` computes the
`i`-th and the `i`-th from the end. Queries travel there and outputs back; what a process holds of the row stays.

Under `ring`, of the documents in a slice only the first can have begun before it, so only its units, the *head*, look
at other processes' keys. Every process knows all documents, hence who needs which keys: at hop `h` a process receives
the keys that its head reaches back to in the slice `h` before its own, and sends its own to the one `h` after, if that
one needs any. Hop `h + 1` is under way while hop `h` is computed. The backward pass fetches the same keys again and
sends their gradients straight to their owners, which sum them. A window shortens what the head reaches back to.

Source: DeepSpeed-Ulysses (arXiv:2309.14509); Llama 3 (arXiv:2407.21783), section 3.3.2, for gathered keys and the order
of halves (deviation: there the row itself is dealt out so); Ring Attention (arXiv:2310.01889), section 3 (deviation:
slices are fetched from their owners instead of being passed on, which moves nothing that no document reaches back to).

Shape legend: U units of a slice, R = cp · U of the row, Q units of the head, H heads, K key-value heads, D head dim,
E = D + value dim, F keys fetched at a hop, P = cp.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

import attrs
import numpy as np
import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from cosmos_core.errors import PluginIncompatibleError, UnevenError
from cosmos_core.models.attention.documents import ContextSlice, Packing, Seen, Span
from cosmos_core.models.attention.kernels import attend
from cosmos_core.models.attention.softmax import (
    Block,
    Merged,
    Scoring,
    block_backward,
    block_forward,
    sinks_backward,
)
from cosmos_core.models.attention.varlen import Rows
from cosmos_core.models.parallel.collectives import all_to_all, gather_dim
from cosmos_core.protocols import Layout


@attrs.frozen(kw_only=True, eq=False)
class Reach:
    """The slices that each slice's head reaches back to, and with how many units.

    Attributes:
        packing: The documents of the row.
        context: This process's slice.
        num_units: U.
        num_head: Q, 0 where a document begins with this process's slice.
        firsts: For each slice, the first unit of the row that its head looks at.
    """

    packing: Packing
    context: ContextSlice
    num_units: int
    num_head: int
    firsts: tuple[int, ...]

    @staticmethod
    def of(packing: Packing, context: ContextSlice, window: int | None = None) -> Reach:
        """Read it off the documents, of which units may look back over `window` units, themselves included."""
        start, stop = packing.bounds
        units = stop - start
        firsts = tuple(packing.first_seen(place * units, window) for place in range(context.size))
        num_head = packing.own.num_head
        return Reach(packing=packing, context=context, num_units=units, num_head=num_head, firsts=firsts)

    @property
    def num_hops(self) -> int:
        """Slices that the farthest head reaches back over."""
        return max(place - first // self.num_units for place, first in enumerate(self.firsts))

    def skipped(self, place: int, hop: int) -> int | None:
        """Leading units of the slice `hop` before `place` that its head does not look at; None: all of them."""
        owner = place - hop
        if owner < 0 or self.firsts[place] >= (owner + 1) * self.num_units:
            return None
        return max(self.firsts[place] - owner * self.num_units, 0)

    def behind(self, hop: int) -> int:
        """Units from the first key fetched at a hop to this process's first query; at hop 0, its own slice, none."""
        skipped = self.skipped(self.context.place, hop)
        assert skipped is not None, "nothing is fetched at this hop"
        return hop * self.num_units - skipped


def ring(rows: Rows, packing: Packing, context: ContextSlice, scoring: Scoring) -> torch.Tensor:
    """The output [U, H, D] of this process's slice."""
    query_UHD, key_UKD, value_UKD = rows
    reach = Reach.of(packing, context, scoring.window)
    head = reach.num_head
    begun = attend((query_UHD[head:], key_UKD[head:], value_UKD[head:]), packing.own.begun, scoring)
    if reach.num_hops == 0 and head == 0:
        return begun
    both_UKE = torch.cat((key_UKD, value_UKD), dim=-1)
    # Called on every process, with or without a head: others may need its keys, in both passes.
    reached: torch.Tensor = _Ring.apply(query_UHD[:head], both_UKE, scoring.sinks_H, reach, scoring)  # type: ignore[no-untyped-call]
    return torch.cat((reached, begun))


class _Ring(torch.autograd.Function):
    """The head's attention to its own slice's keys and to those before."""

    @staticmethod
    def forward(  # noqa: PLR0917 - autograd passes arguments by position
        ctx: Any,
        query_QHD: torch.Tensor,
        both_UKE: torch.Tensor,
        sinks_H: torch.Tensor | None,
        reach: Reach,
        scoring: Scoring,
    ) -> torch.Tensor:
        merged = Merged.of(block_forward(_block(query_QHD, both_UKE[: reach.num_head], reach, 0, scoring)))
        for hop, fetched_FKE in _fetch(both_UKE, reach):
            if fetched_FKE is not None:
                block = _block(query_QHD, fetched_FKE, reach, hop, scoring)
                merged = merged.with_block(block_forward(block))
        merged = merged.with_sinks(sinks_H)
        output_QHE = merged.output_QHE.to(query_QHD.dtype)
        ctx.reach, ctx.scoring = reach, attrs.evolve(scoring, sinks_H=None)
        ctx.save_for_backward(query_QHD, both_UKE, sinks_H, output_QHE, merged.lse_QH)
        return output_QHE

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_QHD: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query_QHD, both_UKE, sinks_H, *softmax = ctx.saved_tensors
        reach: Reach = ctx.reach
        result = (grad_QHD, *softmax)
        own = _block(query_QHD, both_UKE[: reach.num_head], reach, 0, ctx.scoring)
        grad_query_QHD, grad_own_FKE = _gradients(own, *result)
        grad_both_UKE = torch.zeros_like(both_UKE, dtype=own.accumulated)
        grad_both_UKE[: reach.num_head] += grad_own_FKE
        returns: list[_Transfer] = []
        for hop, fetched_FKE in _fetch(both_UKE, reach):
            grad_fetched = None
            if fetched_FKE is not None:
                block = _block(query_QHD, fetched_FKE, reach, hop, ctx.scoring)
                grad_block, grad_fetched = _gradients(block, *result)
                grad_query_QHD = grad_query_QHD + grad_block
            returns.append(_start_return(grad_fetched, grad_both_UKE, reach, hop))
        for transfer in returns:
            if (received_FKE := transfer.wait()) is not None:
                grad_both_UKE[reach.num_units - len(received_FKE) :] += received_FKE
        grad_sinks = sinks_backward(sinks_H, *result)
        return grad_query_QHD.to(query_QHD.dtype), grad_both_UKE.to(both_UKE.dtype), grad_sinks, None, None


def _block(query_QHD: torch.Tensor, both_FKE: torch.Tensor, reach: Reach, hop: int, scoring: Scoring) -> Block:
    D = query_QHD.shape[-1]
    documents = reach.packing.behind((len(query_QHD),), reach.behind(hop), len(both_FKE))
    return Block(rows=(query_QHD, both_FKE[..., :D], both_FKE[..., D:]), documents=documents, scoring=scoring)


def _gradients(block: Block, *result: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Accumulated gradients of the queries, and of keys and values side by side."""
    query, key, value = (each.to(block.accumulated) for each in block_backward(block, *result))
    return query, torch.cat((key, value), dim=-1)


@attrs.frozen(kw_only=True, eq=False)
class _Transfer:
    """Tensors on their way: `received` may be read once the works are done, `sent` is kept alive until then."""

    works: tuple[dist.Work, ...]
    received: torch.Tensor | None
    sent: torch.Tensor | None

    def wait(self) -> torch.Tensor | None:
        for work in self.works:
            work.wait()
        return self.received


def _fetch(both_UKE: torch.Tensor, reach: Reach) -> Iterator[tuple[int, torch.Tensor | None]]:
    """Each hop, and what the head looks at in the slice so far before its own; None: nothing, though others may."""
    under_way = _start_fetch(both_UKE, reach, 1)
    for hop in range(1, reach.num_hops + 1):
        fetched_FKE = under_way.wait()
        if hop < reach.num_hops:
            under_way = _start_fetch(both_UKE, reach, hop + 1)
        yield hop, fetched_FKE


def _start_fetch(both_UKE: torch.Tensor, reach: Reach, hop: int) -> _Transfer:
    place = reach.context.place
    needed, asked = reach.skipped(place, hop), _asked(reach, hop)
    received = None if needed is None else torch.empty_like(both_UKE[needed:])
    sent = None if asked is None else both_UKE[asked:].contiguous()
    return _exchange(reach.context, sent, place + hop, received, place - hop)


def _start_return(grad_FKE: torch.Tensor | None, grad_UKE: torch.Tensor, reach: Reach, hop: int) -> _Transfer:
    """The way of `_start_fetch` backwards, of gradients."""
    place, asked = reach.context.place, _asked(reach, hop)
    received = None if asked is None else torch.empty_like(grad_UKE[asked:])
    return _exchange(reach.context, grad_FKE, place - hop, received, place + hop)


def _asked(reach: Reach, hop: int) -> int | None:
    """Leading units of this process's slice that the one `hop` after does not look at; None: all of them."""
    place = reach.context.place + hop
    return reach.skipped(place, hop) if place < reach.context.size else None


def _exchange(
    context: ContextSlice, sent: torch.Tensor | None, to: int, received: torch.Tensor | None, source: int
) -> _Transfer:
    operations = []
    if sent is not None:
        operations.append(dist.P2POp(dist.isend, sent, group=context.group, group_peer=to))
    if received is not None:
        operations.append(dist.P2POp(dist.irecv, received, group=context.group, group_peer=source))
    works = tuple(dist.batch_isend_irecv(operations)) if operations else ()
    return _Transfer(works=works, received=received, sent=sent)


WORTH: Final = 1.1
"""How much more the dearest slice has to cost than the dearest pair of halves for queries to travel."""


@attrs.frozen(kw_only=True, eq=False)
class Swap:
    """The halves of slices that each process computes; `sizes` counts the units of the halves of each slice."""

    context: ContextSlice
    sizes: tuple[int, int]

    @staticmethod
    def of(packing: Packing, context: ContextSlice, window: int | None) -> Swap | None:
        """The halves, where that evens out the work of the processes; None where slices are even enough."""
        units = packing.num_units // context.size
        if units < 2:
            return None
        swap = Swap(context=context, sizes=(units - units // 2, units // 2))
        seen = packing.documents.once(Seen.of, window)
        cuts = np.cumsum([*swap.sizes] * context.size)[:-1]
        halves = [int(part.sum()) for part in np.split(seen.last_U - seen.first_U + 1, cuts)]
        slices = [sum(halves[2 * place : 2 * place + 2]) for place in range(context.size)]
        pairs = [sum(halves[half] for half in swap.computed(place)) for place in range(context.size)]
        return swap if max(slices) > WORTH * max(pairs) else None

    def computed(self, place: int) -> tuple[int, int]:
        """The halves that a process computes."""
        return place, 2 * self.context.size - 1 - place

    def spans(self, packing: Packing) -> list[Span]:
        """The units that this process computes."""
        starts = {
            half: half // 2 * sum(self.sizes) + half % 2 * self.sizes[0] for half in self.computed(self.context.place)
        }
        return [packing.span(start, start + self.sizes[half % 2]) for half, start in starts.items()]

    def there(self, query_UHD: torch.Tensor) -> torch.Tensor:
        """Queries of this process's halves from those of its slice."""
        ordered = self._turned(query_UHD, self.sizes)
        return all_to_all(ordered, self.context.group, receive=self._received, send=self._sent)

    def back(self, output_UHD: torch.Tensor) -> torch.Tensor:
        """The output of this process's slice from those of its halves."""
        ordered = all_to_all(output_UHD, self.context.group, receive=self._sent, send=self._received)
        return self._turned(ordered, self.sizes[::-1])

    def _turned(self, rows: torch.Tensor, sizes: tuple[int, int]) -> torch.Tensor:
        """The halves of the slice in the order of those that compute them, or these in the slice's own order."""
        first, second = map(self._computes, self._held)
        return rows if first <= second else torch.cat(torch.split(rows, list(sizes))[::-1])

    @property
    def _held(self) -> tuple[int, int]:
        return 2 * self.context.place, 2 * self.context.place + 1

    def _computes(self, half: int) -> int:
        return min(half, 2 * self.context.size - 1 - half)

    @property
    def _sent(self) -> list[int]:
        """The units of this process's slice that each process computes."""
        return self._counts((half, self._computes(half)) for half in self._held)

    @property
    def _received(self) -> list[int]:
        """The units of this process's halves that each process holds: the nearer half comes from an earlier one."""
        return self._counts((half, half // 2) for half in self.computed(self.context.place))

    def _counts(self, places: Iterable[tuple[int, int]]) -> list[int]:
        counts = [0] * self.context.size
        for half, place in places:
            counts[place] += self.sizes[half % 2]
        return counts


def install(module: torch.nn.Module, layout: Layout) -> None:
    """Check that attention of a module can be spread over `cp`; the attention itself is told by each row's packing."""
    size = layout.mesh.size("cp")
    if size == 1:
        return
    config: Any = module.config.get_text_config()  # type: ignore[union-attr,operator]
    heads = config.num_attention_heads // layout.mesh.size("tp")
    if layout.context == "ulysses" and heads % size:
        raise UnevenError(
            f"policy.mesh.cp: {size} does not divide the {heads} attention heads that a process holds, as "
            "policy.parallel.context = 'ulysses' needs; use 'auto' or 'gather'"
        )
    if layout.context == "ring":
        # NCCL wants all of a group in its first call, and a ring's calls are between the few who reach back.
        dist.all_reduce(torch.zeros(1, device=layout.mesh.axis("cp").device_type), group=layout.mesh.group("cp"))


def attend_over_slices(rows: Rows, packing: Packing, scoring: Scoring) -> torch.Tensor:
    """The output [U, H, D] of this process's slice."""
    context = packing.context
    assert context is not None
    method = context.method
    if method == "auto":
        method = "gather" if rows[0].shape[1] % context.size else "ulysses"
    ways = {"gather": _gathered, "ulysses": _ulysses, "ring": ring}
    return ways[method](rows, packing, context, scoring)


def _gathered(rows: Rows, packing: Packing, context: ContextSlice, scoring: Scoring) -> torch.Tensor:
    query_UHD, key_UKD, value_UKD = rows
    both_RKE = gather_dim(torch.cat((key_UKD, value_UKD), dim=-1), 0, context.group)
    swap = Swap.of(packing, context, scoring.window)
    if swap is None:
        return _of_span(query_UHD, both_RKE, packing, packing.own, scoring)
    spans = swap.spans(packing)
    queries = torch.split(swap.there(query_UHD), [span.stop - span.start for span in spans])
    outputs = [_of_span(query, both_RKE, packing, span, scoring) for query, span in zip(queries, spans, strict=True)]
    return swap.back(torch.cat(outputs))


def _of_span(
    query_UHD: torch.Tensor, both_RKE: torch.Tensor, packing: Packing, span: Span, scoring: Scoring
) -> torch.Tensor:
    seen = both_RKE[packing.first_seen(span.start, scoring.window) : span.stop]
    key, value = torch.split(seen, [query_UHD.shape[-1], both_RKE.shape[-1] - query_UHD.shape[-1]], dim=-1)
    return attend((query_UHD, key, value), packing.seen_by(span, scoring.window), scoring)


def _ulysses(rows: Rows, packing: Packing, context: ContextSlice, scoring: Scoring) -> torch.Tensor:
    heads, kv_heads, size = rows[0].shape[1], rows[1].shape[1], context.size
    if heads % size:
        raise PluginIncompatibleError(
            f"policy.mesh.cp: {size} does not divide the {heads} attention heads of a layer, as 'ulysses' needs"
        )
    # So many of each key-value head that each process gets equally many, and those its heads use.
    group = heads // kv_heads
    copies = next(n for n in range(1, group + 1) if group % n == 0 and kv_heads * n % size == 0)
    repeated = [rows[0], *(row.repeat_interleave(copies, dim=1) if copies > 1 else row for row in rows[1:])]
    shares = [torch.unflatten(row, 1, (size, -1)) for row in repeated]
    # One exchange for all three: what goes to each process lies together.
    sent_PUE = torch.cat([share.flatten(2) for share in shares], dim=-1).movedim(1, 0)
    received_RE = all_to_all(sent_PUE.flatten(0, 1), context.group)
    flat = torch.split(received_RE, [share.shape[2] * share.shape[3] for share in shares], dim=1)
    query, key, value = (torch.unflatten(own, 1, share.shape[2:]) for own, share in zip(flat, shares, strict=True))
    if scoring.sinks_H is not None:
        scoring = attrs.evolve(scoring, sinks_H=torch.chunk(scoring.sinks_H, size)[context.place])
    output_RHD = attend((query, key, value), packing.documents, scoring)
    back_PUHD = torch.unflatten(all_to_all(output_RHD, context.group), 0, (size, -1))
    return back_PUHD.movedim(0, 1).flatten(1, 2)
