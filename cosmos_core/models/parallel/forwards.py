"""Changes of what a module's forward does, without changing its class, its names or its parameters.

FSDP gathers and frees weights in hooks round a module's forward. A model plugin calls parts of the module (the base
model, then the output layer), so it hands the root what to run (`within`). Activation checkpointing recomputes in the
backward pass what a layer's forward does not keep.

Source: arXiv:1604.06174 (recompute a layer), arXiv:2205.05198 section 5 (selective).
"""

from __future__ import annotations

import contextlib
import functools
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeVar

import attrs
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map_only, tree_unflatten
from torch.utils.checkpoint import checkpoint

from cosmos_core.protocols import Layout
from cosmos_core.protocols.layout import Recompute

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
    held = module._parameters  # noqa: SLF001 - no public way in
    parameters = {name: held[name] for name in tensors}
    # In place, which torch's compiler can follow, and in their order, which it looks at.
    held.update(tensors)  # type: ignore[arg-type] # as `torch.func.functional_call` does
    try:
        yield
    finally:
        held.update(parameters)


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


SAVED: Final = frozenset(
    {
        *("mm", "addmm", "bmm", "baddbmm", "_scaled_mm"),
        *("_grouped_mm", "grouped_loop", "_scaled_grouped_mm"),
        *("_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu"),
        *("_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention"),
        *("_flash_attention_forward", "_efficient_attention_forward"),
    }
)
"""Operators whose results the selective policy keeps: matrix products and attention."""


def recompute_layer(layer: nn.Module, what: Recompute) -> None:
    """Make the backward pass of a layer that draws nothing random recompute its forward, with the same bits."""
    if what == "none":
        return
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if what == "selective":
        options["context_fn"] = _selective

    def around(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return inner(*args, **kwargs)
        # Autograd saves what is given by position; what a closure holds it does not see.
        names = [name for name, value in kwargs.items() if isinstance(value, torch.Tensor)]
        tensors = [kwargs.pop(name) for name in names]

        def by_position(*given: Any) -> Any:
            first = len(given) - len(names)
            return inner(*given[:first], **kwargs, **dict(zip(names, given[first:], strict=True)))

        return checkpoint(by_position, *args, *tensors, **options)

    surround(layer, around)


@attrs.frozen(kw_only=True, eq=False)
class _Result:
    """The result of an operator, and how often it had been changed by then."""

    values: list[Any]
    spec: TreeSpec
    versions: list[int]

    @staticmethod
    def of(result: Any) -> _Result:
        values, spec = tree_flatten(tree_map_only(torch.Tensor, _alias, result))
        return _Result(values=values, spec=spec, versions=_versions(values))


class _Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """One of a pair of modes that share results by operator: a forward pass keeps them, a backward pass reuses them.

    What the layer has changed in place since is not reused. Deviation from torch's own pair of modes, which wants every
    operator of the forward pass to come again: FSDP within a layer (of its experts) gathers by other operators in a
    backward pass.
    """

    def __init__(self, results: dict[Any, deque[_Result]], *, reuses: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.results: Final = results
        self.reuses: Final = reuses

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """A compiled part of a layer is run again whole."""
        return True

    def __torch_dispatch__(
        self, operator: Any, _: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        is_saved = isinstance(operator, torch._ops.OpOverload) and operator.overloadpacket.__name__ in SAVED  # noqa: SLF001
        if self.reuses and is_saved:
            kept = self.results[operator].popleft()
            if _versions(kept.values) == kept.versions:
                return tree_unflatten(kept.values, kept.spec)
        result = operator(*args, **(kwargs or {}))
        if is_saved and not self.reuses:
            self.results[operator].append(_Result.of(result))
        return result


def _selective() -> tuple[_Mode, _Mode]:
    results: dict[Any, deque[_Result]] = defaultdict(deque)
    return _Mode(results, reuses=False), _Mode(results, reuses=True)


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    """The same values apart from the graph; a change of the one is counted at the other."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):  # noqa: SLF001
        return tensor.detach()


def _versions(values: list[Any]) -> list[int]:
    return [value._version for value in values if isinstance(value, torch.Tensor)]  # noqa: SLF001
