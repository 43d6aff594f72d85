"""Changes of what a module's forward does, without changing its class, its names or its parameters.

FSDP gathers and frees weights in hooks round a module's forward. A model plugin calls parts of the module (the base
model, then the output layer), so it hands the root what to run (`within`).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeVar

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_map_only

from cosmos_core.protocols import Layout

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


Change = Callable[[torch.Tensor], torch.Tensor]


def change_hidden(module: nn.Module, *, before: Change | None = None, after: Change | None = None) -> None:
    """Change the hidden states that a layer or a block is given, or those that it gives.

    They are the first argument or `hidden_states`; and all of the result, or the first of a tuple.
    """

    def around(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if before is not None and args:
            args = (before(args[0]), *args[1:])
        elif before is not None:
            kwargs["hidden_states"] = before(kwargs["hidden_states"])
        result = inner(*args, **kwargs)
        if after is None:
            return result
        return (after(result[0]), *result[1:]) if isinstance(result, tuple) else after(result)

    surround(module, around)


Result = TypeVar("Result")

_LAYOUT: Final = "_cosmos_layout"


def root(module: nn.Module, layout: Layout, beside: Sequence[nn.Module] = ()) -> None:
    """Let `within` run inside the module's forward; remember the layout.

    Parts `beside` are some that not every forward calls, such as a vision tower where there is no image. They get a
    gradient of zeros then: processes reduce gradients together, so each has to have the same ones.
    """

    def around(inner: Callable[..., Any], *args: Any, evaluate: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        if evaluate is None:
            return inner(*args, **kwargs)
        results = evaluate()
        unused = [each for part in beside for each in part.parameters() if each.requires_grad]
        if unused and torch.is_grad_enabled():
            results = tree_map_only(torch.Tensor, lambda each: _anchored(each, unused), results)
        # FSDP hangs its backward hook on the results, where an in-place change of a view would lose it.
        return tree_map_only(torch.Tensor, lambda each: each.clone() if each._is_view() else each, results)  # noqa: SLF001

    surround(module, around)
    module.__dict__[_LAYOUT] = layout


def layout_of(module: nn.Module) -> Layout | None:
    """The layout that a module was parallelized with; None for a plain one."""
    layout: Layout | None = module.__dict__.get(_LAYOUT)
    return layout


def within(module: nn.Module, body: Callable[[], Result]) -> Result:
    """Call `body` inside the module's forward, so that the hooks round it apply; of a plain module this is `body()`.

    The body gives tensors in plain containers: FSDP finds no others.
    """
    if layout_of(module) is None:
        return body()
    result: Result = module(evaluate=body)
    if isinstance(module, FSDPModule) and not torch.is_grad_enabled():
        # Without a backward pass nothing else frees weights that stay gathered, and an update would not reach them.
        for part in module.modules():
            if isinstance(part, FSDPModule):
                part.reshard()
    return result


def _anchored(tensor: torch.Tensor, parameters: Sequence[nn.Parameter]) -> torch.Tensor:
    if not tensor.requires_grad:
        return tensor
    result: torch.Tensor = _Anchor.apply(tensor, *parameters)  # type: ignore[no-untyped-call]
    return result


class _Anchor(torch.autograd.Function):
    """The tensor as it is; parameters get zeros as their gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*parameters)
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        zeros = (each.new_zeros(()).expand(each.shape) for each in ctx.saved_tensors)
        return (grad, *zeros)
