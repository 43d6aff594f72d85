"""Activation checkpointing of layers: what the backward pass recomputes instead of keeping.

Source: arXiv:1604.06174 (recompute a layer), arXiv:2205.05198 section 5 (selective).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from cosmos_core.policy.mesh.forwards import surround
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
    """Make the layer's backward pass recompute its forward, with the same bits.

    Args:
        layer: A layer whose forward draws nothing random.
        what: `full`: all of it; `selective`: all but matrix products and attention; `none`.
    """
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


class _Reuse(TorchDispatchMode):
    """torch's mode of a backward pass, asked for what is kept alone.

    It wants the forward pass to be run again operator by operator, whereas FSDP within a layer (of its experts) gathers
    in a backward pass by other operators than in a forward pass.

    Args:
        kept: torch's mode.
    """

    def __init__(self, kept: Any) -> None:
        super().__init__()
        self._kept: Final = kept

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """As torch's mode."""
        return True

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if _is_saved(operator):
            return self._kept.__torch_dispatch__(operator, types, args, kwargs)
        return operator(*args, **(kwargs or {}))


def _selective() -> tuple[Any, _Reuse]:
    forward, backward = create_selective_checkpoint_contexts(_policy)
    return forward, _Reuse(backward)


def _policy(_: Any, operator: Any, *__: Any, **___: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if _is_saved(operator) else CheckpointPolicy.PREFER_RECOMPUTE


def _is_saved(operator: Any) -> bool:
    return isinstance(operator, torch._ops.OpOverload) and operator.overloadpacket.__name__ in SAVED  # noqa: SLF001
