"""Ring attention over packed documents: keys and values are fetched slice by slice, and partial softmaxes merged.

Of the documents in a slice only the first can have begun before it, so only its units, the *head*, look at other
processes' keys. Every process knows all documents, hence who needs which keys: at hop `h` a process receives the keys
that its head reaches back to in the slice `h` before its own, and sends its own to the one `h` after, if that one
needs any. Hop `h + 1` is under way while hop `h` is computed. The backward pass fetches the same keys again and sends
their gradients straight to their owners, which sum them in float32.

Deviation from the paper: slices are fetched from their owners instead of being passed on from neighbour to neighbour.
The volume is the same, and nothing is moved that no document reaches back to.

Source: Ring Attention (arXiv:2310.01889), section 3; FlashAttention-2 (arXiv:2307.08691), equation 3.1, for merging.

Shape legend: U units of a slice, Q units of its head, H heads, K key-value heads, D head dim, E = D + value dim,
F keys fetched at a hop.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from cosmos_core.policy.modeling.attention.blocks import Block, block_backward, block_forward
from cosmos_core.policy.modeling.attention.documents import ContextSlice, Packing
from cosmos_core.policy.modeling.attention.scores import Rows, Scoring, attend


@attrs.frozen(kw_only=True, eq=False)
class Reach:
    """How far each slice's head reaches back, and with how many units.

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
    def of(packing: Packing, context: ContextSlice) -> Reach:
        """Read it off the documents."""
        start, stop = packing.bounds
        units = stop - start
        firsts = tuple(packing.reach_back(place * units) for place in range(context.size))
        num_head = min(packing.first_end, stop) - start if firsts[context.place] < start else 0
        return Reach(context=context, num_units=units, num_head=num_head, firsts=firsts)

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


def ring(rows: Rows, packing: Packing, context: ContextSlice, scoring: Scoring) -> torch.Tensor:
    """The output [U, H, D] of this process's slice; for plain scores without a window."""
    query_UHD, key_UKD, value_UKD = rows
    reach = Reach.of(packing, context)
    head = reach.num_head
    begun = attend((query_UHD[head:], key_UKD[head:], value_UKD[head:]), packing.begun_runs, packing, scoring)
    if reach.num_hops == 0:
        return begun
    both_UKE = torch.cat((key_UKD, value_UKD), dim=-1)
    scale = query_UHD.shape[-1] ** -0.5 if scoring.scale is None else scoring.scale
    # Called on every process, with or without a head: others may need its keys, in both passes.
    reached: torch.Tensor = _Ring.apply(query_UHD[:head], both_UKE, reach, scale)  # type: ignore[no-untyped-call]
    return torch.cat((reached, begun))


class _Ring(torch.autograd.Function):
    """The head's attention to its own slice's keys and to those before."""

    @staticmethod
    def forward(ctx: Any, query_QHD: torch.Tensor, both_UKE: torch.Tensor, reach: Reach, scale: float) -> torch.Tensor:
        ctx.reach, ctx.scale = reach, scale
        merged = _Merged.of(block_forward(_own(query_QHD, both_UKE, reach, scale)))
        for fetched_FKE in _fetch(both_UKE, reach):
            if fetched_FKE is not None:
                merged = merged.with_block(block_forward(_earlier(query_QHD, fetched_FKE, scale)))
        output_QHD = merged.output_QHD.to(query_QHD.dtype)
        ctx.save_for_backward(query_QHD, both_UKE, output_QHD, merged.lse_QH)
        return output_QHD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_QHD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        query_QHD, both_UKE, output_QHD, lse_QH = ctx.saved_tensors
        reach: Reach = ctx.reach
        result = (grad_QHD, output_QHD, lse_QH)
        grad_query_QHD, grad_own = block_backward(_own(query_QHD, both_UKE, reach, ctx.scale), *result)
        grad_both_UKE = torch.zeros_like(both_UKE, dtype=torch.float32)
        grad_both_UKE[: reach.num_head] += grad_own
        returns: list[_Transfer] = []
        for hop, fetched_FKE in enumerate(_fetch(both_UKE, reach), start=1):
            grad_fetched = None
            if fetched_FKE is not None:
                grad_block, grad_fetched = block_backward(_earlier(query_QHD, fetched_FKE, ctx.scale), *result)
                grad_query_QHD = grad_query_QHD + grad_block
            returns.append(_start_return(grad_fetched, both_UKE, reach, hop))
        for transfer in returns:
            if (received_FKE := transfer.wait()) is not None:
                grad_both_UKE[reach.num_units - len(received_FKE) :] += received_FKE
        return grad_query_QHD.to(query_QHD.dtype), grad_both_UKE.to(both_UKE.dtype), None, None


@attrs.frozen(kw_only=True, eq=False)
class _Merged:
    """A softmax over the blocks of keys seen so far, in float32: its output [Q, H, D] and log-sum-exp [Q, H]."""

    output_QHD: torch.Tensor
    lse_QH: torch.Tensor

    @staticmethod
    def of(block: tuple[torch.Tensor, torch.Tensor]) -> _Merged:
        return _Merged(output_QHD=block[0].float(), lse_QH=block[1])

    def with_block(self, block: tuple[torch.Tensor, torch.Tensor]) -> _Merged:
        output_QHD, lse_QH = block
        total_QH = torch.logaddexp(self.lse_QH, lse_QH)
        old_QH1, new_QH1 = ((part - total_QH).exp()[..., None] for part in (self.lse_QH, lse_QH))
        return _Merged(output_QHD=self.output_QHD * old_QH1 + output_QHD.float() * new_QH1, lse_QH=total_QH)


def _own(query_QHD: torch.Tensor, both_UKE: torch.Tensor, reach: Reach, scale: float) -> Block:
    return Block(query_QHD=query_QHD, both_FKE=both_UKE[: reach.num_head], is_causal=True, scale=scale)


def _earlier(query_QHD: torch.Tensor, fetched_FKE: torch.Tensor, scale: float) -> Block:
    return Block(query_QHD=query_QHD, both_FKE=fetched_FKE, is_causal=False, scale=scale)


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


def _fetch(both_UKE: torch.Tensor, reach: Reach) -> Iterator[torch.Tensor | None]:
    """What the head looks at in each slice before its own, nearest first; None: nothing, though others may."""
    under_way = _start_fetch(both_UKE, reach, 1)
    for hop in range(1, reach.num_hops + 1):
        fetched_FKE = under_way.wait()
        if hop < reach.num_hops:
            under_way = _start_fetch(both_UKE, reach, hop + 1)
        yield fetched_FKE


def _start_fetch(both_UKE: torch.Tensor, reach: Reach, hop: int) -> _Transfer:
    place = reach.context.place
    needed, asked = reach.skipped(place, hop), _asked(reach, hop)
    received = None if needed is None else torch.empty_like(both_UKE[needed:])
    sent = None if asked is None else both_UKE[asked:].contiguous()
    return _exchange(reach.context, sent, place + hop, received, place - hop)


def _start_return(grad_FKE: torch.Tensor | None, both_UKE: torch.Tensor, reach: Reach, hop: int) -> _Transfer:
    """The way of `_start_fetch` backwards, in float32."""
    place, asked = reach.context.place, _asked(reach, hop)
    received = None if asked is None else torch.empty_like(both_UKE[asked:], dtype=torch.float32)
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
