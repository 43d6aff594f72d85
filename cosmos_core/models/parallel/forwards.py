"""Change what a module's forward does without changing its class, its names or its parameters."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

Around = Callable[..., Any]


def surround(module: nn.Module, around: Around) -> None:
    """Replace the forward by `around(forward, *args, **kwargs)`; what was put around earlier lies inside."""
    inner = module.forward

    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return around(inner, *args, **kwargs)

    module.forward = forward


@contextlib.contextmanager
def substituted(module: nn.Module, tensors: Mapping[str, torch.Tensor | None]) -> Iterator[None]:
    """The module's own parameters replaced by tensors for the length of a call."""
    parameters = {name: module._parameters.pop(name) for name in tensors}  # noqa: SLF001 - no public way in
    module.__dict__.update(tensors)
    try:
        yield
    finally:
        for name, parameter in parameters.items():
            del module.__dict__[name]
            module._parameters[name] = parameter  # noqa: SLF001


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that a module holds itself, by their local name."""
    return dict(module.named_parameters(recurse=False, remove_duplicate=False))


def replace_first(args: tuple[Any, ...], kwargs: dict[str, Any], change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Arguments of a layer or a block with its hidden states changed: the first argument, or `hidden_states`."""
    if args:
        return (change(args[0]), *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": change(kwargs["hidden_states"])}


def replace_result(result: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A layer's or a block's result with its hidden states changed: all of it, or the first of a tuple."""
    return (change(result[0]), *result[1:]) if isinstance(result, tuple) else change(result)
