"""Activation checkpointing of layers: what the backward pass recomputes instead of keeping.

Source: arXiv:1604.06174 (recompute a layer), arXiv:2205.05198 section 5 (selective).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import nn
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
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _policy)

    def around(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return inner(*args, **kwargs)
        return checkpoint(functools.partial(inner, **kwargs), *args, **options)

    surround(layer, around)


def _policy(_: Any, operator: Any, *__: Any, **___: Any) -> CheckpointPolicy:
    name = operator.overloadpacket.__name__ if isinstance(operator, torch._ops.OpOverload) else ""  # noqa: SLF001
    return CheckpointPolicy.MUST_SAVE if name in SAVED else CheckpointPolicy.PREFER_RECOMPUTE
