"""Activation checkpointing of layers: what the backward pass recomputes instead of keeping.

Source: arXiv:1604.06174 (recompute a layer), arXiv:2205.05198 section 5 (selective).
"""

from __future__ import annotations

import functools
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any, Final

import attrs
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map_only, tree_unflatten
from torch.utils.checkpoint import checkpoint

from cosmos_core.models.parallel.forwards import surround
from cosmos_core.protocols.layout import Recompute

SAVED: Final = frozenset(
    {
        "mm",
        "addmm",
        "bmm",
        "baddbmm",
        "_grouped_mm",
        "_scaled_mm",
        "_scaled_grouped_mm",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_flash_attention_forward",
        "_efficient_attention_forward",
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
        return checkpoint(functools.partial(inner, **kwargs), *args, **options)

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

    @property
    def is_as_it_was(self) -> bool:
        return _versions(self.values) == self.versions


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
        is_saved = _is_saved(operator)
        if self.reuses and is_saved:
            kept = self.results[operator].popleft()
            if kept.is_as_it_was:
                return tree_unflatten(kept.values, kept.spec)
        result = operator(*args, **(kwargs or {}))
        if is_saved and not self.reuses:
            self.results[operator].append(_Result.of(result))
        return result


def _selective() -> tuple[_Mode, _Mode]:
    results: dict[Any, deque[_Result]] = defaultdict(deque)
    return _Mode(results, reuses=False), _Mode(results, reuses=True)


def _is_saved(operator: Any) -> bool:
    return isinstance(operator, torch._ops.OpOverload) and operator.overloadpacket.__name__ in SAVED  # noqa: SLF001


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    """The same values apart from the graph; a change of the one is counted at the other."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):  # noqa: SLF001
        return tensor.detach()


def _versions(values: list[Any]) -> list[int]:
    return [value._version for value in values if isinstance(value, torch.Tensor)]  # noqa: SLF001
