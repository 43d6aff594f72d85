"""Matrices packed for a CPU's bfloat16 kernels.

The product of a matrix with the few rows of a step takes about as long as bringing the matrix into the order that the
kernel reads it in. So linear layers compute with copies in that order, made once for each version. The parameters stay
as they are: they are what updates write to and digests are read from. Products of inputs that lie in order are the same
to the last bit; of others, a bias is added before rounding instead of after.

In a compiled forward a product is an operator of its own, which takes the parameter and looks its copy up when it runs.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Final

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from cosmos_core.errors import AttestationError
from cosmos_core.rollout.embedded.compiled import operator
from cosmos_core.rollout.serving.updates import same_bits

_KERNELS: Final = torch.ops.mkldnn
_ROWS: Final = 64
"""A hint for the packing: the rows that a step has, about."""

_COPIES: Final = WeakTensorKeyDictionary()
"""The packed copy of a parameter, while that lives."""


class PackedMatrices:
    """The packed matrices of linear layers, by name, which compute with them from now on.

    They take the memory of these matrices a second time.
    """

    def __init__(self, layers: Mapping[str, torch.nn.Linear]) -> None:
        self._layers: Final = layers
        self._packed: Final[dict[str, torch.Tensor]] = {}
        self.pack()

    @staticmethod
    def of(module: torch.nn.Module) -> PackedMatrices | None:
        """Pack what gains by it; None where nothing does: other devices and dtypes, CPUs without such kernels."""
        layers = {
            name: layer
            for name, layer in module.named_modules()
            if isinstance(layer, torch.nn.Linear) and _gains(layer)
        }
        return PackedMatrices(layers) if layers and _has_kernels() else None

    def pack(self) -> None:
        """Take over the parameters as they are now."""
        for name, layer in self._layers.items():
            packed = _KERNELS._reorder_linear_weight(layer.weight.detach(), _ROWS)  # noqa: SLF001 - as below
            self._packed[name] = _COPIES[layer.weight] = packed
            layer.forward = functools.partial(_forward, packed, layer.weight, layer.bias)  # type: ignore[method-assign]

    def clear(self) -> None:
        """Hold nothing, until they are packed again."""
        for layer in self._layers.values():
            del layer.forward, _COPIES[layer.weight]
        self._packed.clear()

    def check(self) -> None:
        """Read the packed matrices back."""
        for name, layer in self._layers.items():
            held = self._packed[name].to_dense()
            if not same_bits(held, layer.weight.detach()):
                raise AttestationError(
                    f"{name}.weight: the packed copy that products are computed with is not what is loaded"
                )


def _forward(
    packed: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, inputs: torch.Tensor
) -> torch.Tensor:
    if torch.compiler.is_dynamo_compiling():
        return _packed_product(inputs, weight, bias)
    return _product(packed, bias, inputs)


def _product(packed: torch.Tensor, bias: torch.Tensor | None, inputs: torch.Tensor) -> torch.Tensor:
    # torch has packed products for its compiler only: there is no public way to them.
    product: torch.Tensor = _KERNELS._linear_pointwise(inputs, packed, bias, "none", [], "")  # noqa: SLF001
    return product


_packed_product: Final = operator(
    "packed_product(Tensor inputs, Tensor weight, Tensor? bias) -> Tensor",
    lambda inputs, weight, bias: _product(_COPIES[weight], bias, inputs),
    lambda inputs, weight, _bias: inputs.new_empty(*inputs.shape[:-1], weight.shape[0]),
)


def _gains(layer: torch.nn.Linear) -> bool:
    # Subclasses may compute otherwise.
    if type(layer) is not torch.nn.Linear or type(layer.weight) is not torch.nn.Parameter:
        return False
    return layer.weight.device.type == "cpu" and layer.weight.dtype is torch.bfloat16


def _has_kernels() -> bool:
    needed = ("_is_mkldnn_bf16_supported", "_reorder_linear_weight", "_linear_pointwise")
    return bool(torch.backends.mkldnn.is_available()) and (  # type: ignore[no-untyped-call]
        all(hasattr(_KERNELS, name) for name in needed) and bool(_KERNELS._is_mkldnn_bf16_supported())  # noqa: SLF001
    )
