"""Collectives that gradients pass through, each with the backward that makes a sum of losses right.

Two kinds of tensors meet here. A *shared* one holds the same values on each process of a group; a *split* one has
its own part on each. The backward of each function is named by what the gradient of its result means: `partial`
gradients are the terms of a sum over the group, `whole` ones are the same complete gradient on each process.

A group of one process (None) makes each function the identity.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

Group = dist.ProcessGroup | None
Change = Callable[[torch.Tensor, dist.ProcessGroup], torch.Tensor]

# torch 2.13 renamed these; the old names warn.
_gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter_into = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def copy_to_group(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    """A shared tensor as it is; its gradients are partial, and the backward pass sums them."""
    return _call(tensor, group, lambda whole, _: whole.view_as(whole), _all_reduce)


def sum_over_group(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    """The sum of the group's tensors, shared; its gradient is whole, and passes as it is."""
    return _call(tensor, group, _all_reduce, lambda grad, _: grad)


def gather_dim(tensor: torch.Tensor, dim: int, group: Group) -> torch.Tensor:
    """Equal parts joined along `dim`; the result's gradients are partial: each process takes its part of their sum."""
    return _call(tensor, group, partial(_all_gather, dim), partial(_reduce_scatter, dim))


def gather_for_shared(tensor: torch.Tensor, dim: int, group: Group) -> torch.Tensor:
    """Equal parts joined along `dim`; the result's gradient is whole, and each process takes its part of it."""
    return _call(tensor, group, partial(_all_gather, dim), lambda grad, of: part(grad, dim, of))


def reduce_scatter_dim(tensor: torch.Tensor, dim: int, group: Group) -> torch.Tensor:
    """This process's part along `dim` of the sum of the group's tensors; the backward pass gathers."""
    return _call(tensor, group, partial(_reduce_scatter, dim), partial(_all_gather, dim))


def split_dim(tensor: torch.Tensor, dim: int, group: Group) -> torch.Tensor:
    """This process's part along `dim` of a shared tensor; the backward pass gathers, so that the gradient is whole."""
    return _call(tensor, group, partial(_own, dim), partial(_all_gather, dim))


def all_to_all(
    tensor: torch.Tensor, group: Group, receive: Sequence[int] | None = None, send: Sequence[int] | None = None
) -> torch.Tensor:
    """Send a part of the first dimension to each process; the backward pass sends the gradients back.

    `receive` and `send` are the rows of each process, in their order; None: equal parts.
    """
    return _call(tensor, group, partial(_exchange, receive, send), partial(_exchange, send, receive))


def _call(tensor: torch.Tensor, group: Group, forward: Change, backward: Change) -> torch.Tensor:
    if group is None:
        return tensor
    result: torch.Tensor = _Collective.apply(tensor, group, forward, backward)  # type: ignore[no-untyped-call]
    return result


class _Collective(torch.autograd.Function):
    """A change of a tensor, and that of its gradient."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup, forward: Change, backward: Change
    ) -> torch.Tensor:
        ctx.change, ctx.group = backward, group
        return forward(tensor, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return ctx.change(grad, ctx.group), None, None, None


def part(tensor: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    """This process's equal part along `dim`, as a view, without gradient of its own."""
    size = group.size()
    assert tensor.shape[dim] % size == 0, f"{tensor.shape[dim]} is no multiple of {size}"
    length = tensor.shape[dim] // size
    return tensor.narrow(dim, group.rank() * length, length)


def _own(dim: int, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    # A view, contiguous as it may be, would keep all of the tensor, and have strides of its own.
    return part(tensor, dim, group).clone(memory_format=torch.contiguous_format)


def _all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    total = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def _all_gather(dim: int, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    is_outermost = _is_outermost(tensor, dim)
    shape = list(tensor.shape)
    shape[dim if is_outermost else 0] *= group.size()
    joined = tensor.new_empty(shape)
    _gather_into(joined.flatten(0, dim), tensor.contiguous().flatten(0, dim), group=group)
    return joined if is_outermost else torch.cat(joined.chunk(group.size()), dim)


def _reduce_scatter(dim: int, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    assert tensor.shape[dim] % group.size() == 0, f"{tensor.shape[dim]} is no multiple of {group.size()}"
    parts = tensor.contiguous() if _is_outermost(tensor, dim) else torch.cat(tensor.chunk(group.size(), dim))
    own = parts.new_empty((*tensor.shape[:dim], tensor.shape[dim] // group.size(), *tensor.shape[dim + 1 :]))
    _scatter_into(own.flatten(0, dim), parts.flatten(0, dim), group=group)
    return own


def _is_outermost(tensor: torch.Tensor, dim: int) -> bool:
    """Tell whether parts along `dim` lie one after another, so that they are joined where they arrive."""
    return math.prod(tensor.shape[:dim]) == 1


def _exchange(
    receive: Sequence[int] | None, send: Sequence[int] | None, tensor: torch.Tensor, group: dist.ProcessGroup
) -> torch.Tensor:
    rows = tensor.shape[0] if receive is None else sum(receive)
    received = tensor.new_empty((rows, *tensor.shape[1:]))
    dist.all_to_all_single(
        received,
        tensor.contiguous(),
        output_split_sizes=None if receive is None else list(receive),
        input_split_sizes=None if send is None else list(send),
        group=group,
    )
    return received
