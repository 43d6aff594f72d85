"""Sequence parallelism: between blocks, each process of `tp` holds its part of the sequence.

A decoder layer's children with submodules are its blocks (attention, MLP); children without are norms and other maps
of one position, which work on a part of the sequence: only their parameters' gradients have to be summed. A block
sees the whole sequence. Where all of it is tensor parallel, the gather before it sums gradients and its result is
scattered (*gathered* block); otherwise it runs whole on each process, and its result is split.

Source: arXiv:2205.05198 section 4.2.2. Deviation: blocks that are not tensor parallel throughout, such as experts
and their router, keep the all-reduce inside.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from cosmos_core.errors import PluginIncompatibleError
from cosmos_core.models.parallel.collectives import gather_dim, gather_for_shared, split_dim
from cosmos_core.models.parallel.forwards import own_parameters, replace_first, replace_result, surround
from cosmos_core.models.parallel.tensor import sum_parameter_gradients

SEQUENCE: int = 1
"""The sequence's dimension of [B, S, D]."""


def split_layers(layers: Sequence[nn.Module], gathered: Callable[[nn.Module], bool], group: dist.ProcessGroup) -> None:
    """Hold a part of the sequence from before the first layer to after the last one.

    Args:
        layers: The decoder layers that this process has, in order; tensor parallel styles are applied already.
        gathered: Whether a child of a layer is tensor parallel throughout, with styles applied for a gathered block.
        group: The processes of `tp`.

    Raises:
        PluginIncompatibleError: A layer mixes positions outside its blocks.
    """
    for layer in layers:
        _split_children(layer, gathered, group)
        if own_parameters(layer):
            sum_parameter_gradients(layer, group)
    if layers:
        _enter(layers[0], group)
        _leave(layers[-1], group)


def _split_children(layer: nn.Module, gathered: Callable[[nn.Module], bool], group: dist.ProcessGroup) -> None:
    for name, child in layer.named_children():
        if gathered(child):
            continue
        if next(child.children(), None) is not None:
            _surround_shared(child, group)
        elif own_parameters(child):
            if type(child).__name__.startswith("Conv") and not type(child).__name__ == "Conv1D":
                raise PluginIncompatibleError(
                    f"{type(layer).__name__}.{name} mixes positions, which sequence parallelism does not split: set "
                    "policy.parallel.sequence_parallel = false"
                )
            sum_parameter_gradients(child, group)


def gather_block(block: nn.Module, group: dist.ProcessGroup) -> None:
    """Gather the input of a block that is tensor parallel throughout: its gradient is partial."""

    def around(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        args, kwargs = replace_first(args, kwargs, lambda hidden: gather_dim(hidden, hidden.dim() - 2, group))
        return inner(*args, **kwargs)

    surround(block, around)


def _surround_shared(block: nn.Module, group: dist.ProcessGroup) -> None:
    def around(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        args, kwargs = replace_first(args, kwargs, lambda hidden: gather_for_shared(hidden, SEQUENCE, group))
        return replace_result(inner(*args, **kwargs), lambda result: split_dim(result, result.dim() - 2, group))

    surround(block, around)


def _enter(layer: nn.Module, group: dist.ProcessGroup) -> None:
    def around(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        args, kwargs = replace_first(args, kwargs, lambda hidden: _split(hidden, group))
        return inner(*args, **kwargs)

    surround(layer, around)


def _leave(layer: nn.Module, group: dist.ProcessGroup) -> None:
    def around(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return replace_result(inner(*args, **kwargs), lambda result: gather_for_shared(result, SEQUENCE, group))

    surround(layer, around)


def _split(hidden: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    if hidden.dim() != 3 or hidden.shape[SEQUENCE] % group.size():
        raise PluginIncompatibleError(
            f"hidden states of shape {tuple(hidden.shape)} cannot be split into {group.size()} parts of the sequence: "
            "pad the row, or set policy.parallel.sequence_parallel = false"
        )
    return split_dim(hidden, SEQUENCE, group)
