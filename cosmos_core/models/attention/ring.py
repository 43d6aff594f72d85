"""Ring attention over packed documents: keys and values are fetched slice by slice, and partial softmaxes merged.

Of the documents in a slice only the first can have begun before it, so only its units, the *head*, look at other
processes' keys. Every process knows all documents, hence who needs which keys: at hop `h` a process receives the keys
that its head reaches back to in the slice `h` before its own, and sends its own to the one `h` after, if that one
needs any. Hop `h + 1` is under way while hop `h` is computed. The backward pass fetches the same keys again and sends
their gradients straight to their owners, which sum them. A window shortens what the head reaches back to; soft caps
and sinks are the blocks' own.

Deviation from the paper: slices are fetched from their owners instead of being passed on from neighbour to neighbour.
The volume is the same, and nothing is moved that no document reaches back to.

Source: Ring Attention (arXiv:2310.01889), section 3.

Shape legend: U units of a slice, Q units of its head, H heads, K key-value heads, D head dim, E = D + value dim,
F keys fetched at a hop; B = 1, as blocks want it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from cosmos_core.models.attention.blocks import Block, block_backward, block_forward
from cosmos_core.models.attention.documents import ContextSlice, Packing
from cosmos_core.models.attention.scores import Merged, Rows, Scoring, attend, sinks_backward


@attrs.frozen(kw_only=True, eq=False)
class Reach:
    """The slices that each slice's head reaches back to, and with how many units.

    Attributes:
        context: This process's slice.
        num_units: U.
        num_head: Q, 0 where a document begins with this process's slice.
        firsts: For each slice, the first unit of the row that its head looks at.
    """

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
        return Reach(context=context, num_units=units, num_head=packing.own.num_head, firsts=firsts)

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
        """Units from the first key fetched at a hop to this process's first query."""
        skipped = self.skipped(self.context.place, hop)
        assert skipped is not None, "nothing is fetched at this hop"
        return hop * self.num_units - skipped


def ring(rows: Rows, packing: Packing, context: ContextSlice, scoring: Scoring) -> torch.Tensor:
    """The output [U, H, D] of this process's slice."""
    query_UHD, key_UKD, value_UKD = rows
    reach = Reach.of(packing, context, scoring.window)
    head = reach.num_head
    begun = attend((query_UHD[head:], key_UKD[head:], value_UKD[head:]), packing.own.begun, packing, scoring)
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
        merged = Merged.of(block_forward(_block(query_QHD, both_UKE[: reach.num_head], 0, scoring)))
        for hop, fetched_FKE in _fetch(both_UKE, reach):
            if fetched_FKE is not None:
                merged = merged.with_block(block_forward(_block(query_QHD, fetched_FKE, reach.behind(hop), scoring)))
        merged = merged.with_sinks(sinks_H)
        output_BQHD = merged.output_BQHD.to(query_QHD.dtype)
        ctx.reach, ctx.scoring = reach, attrs.evolve(scoring, sinks_H=None)
        ctx.save_for_backward(query_QHD, both_UKE, sinks_H, output_BQHD, merged.lse_BQH)
        return output_BQHD[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_QHD: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query_QHD, both_UKE, sinks_H, *softmax = ctx.saved_tensors
        reach: Reach = ctx.reach
        result = (grad_QHD[None], *softmax)
        grad_query_BQHD, grad_own_BFKE = block_backward(
            _block(query_QHD, both_UKE[: reach.num_head], 0, ctx.scoring), *result
        )
        grad_both_UKE = torch.zeros_like(both_UKE, dtype=grad_own_BFKE.dtype)
        grad_both_UKE[: reach.num_head] += grad_own_BFKE[0]
        returns: list[_Transfer] = []
        for hop, fetched_FKE in _fetch(both_UKE, reach):
            grad_fetched = None
            if fetched_FKE is not None:
                block = _block(query_QHD, fetched_FKE, reach.behind(hop), ctx.scoring)
                grad_block, grad_fetched_BFKE = block_backward(block, *result)
                grad_query_BQHD, grad_fetched = grad_query_BQHD + grad_block, grad_fetched_BFKE[0]
            returns.append(_start_return(grad_fetched, grad_both_UKE, reach, hop))
        for transfer in returns:
            if (received_FKE := transfer.wait()) is not None:
                grad_both_UKE[reach.num_units - len(received_FKE) :] += received_FKE
        grad_sinks = sinks_backward(sinks_H, *result)
        return grad_query_BQHD[0].to(query_QHD.dtype), grad_both_UKE.to(both_UKE.dtype), grad_sinks, None, None


def _block(query_QHD: torch.Tensor, both_FKE: torch.Tensor, num_behind: int, scoring: Scoring) -> Block:
    return scoring.block(query_QHD[None], both_FKE[None], num_behind)


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
