"""The weights that an engine has loaded: tensors as they travel, and the module's parameters that are made of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch

from cosmos_core.errors import AttestationError, EngineError
from cosmos_core.protocols import Format
from cosmos_core.rollout.serving.comparing import same_bits
from cosmos_core.weights.digest import digest_of
from cosmos_core.weights.quantization import dequantised_rows, quantise_tensors


class LoadedWeights:
    """Codes and scales of the matrices, and every other tensor as it is.

    Codes and scales are the truth: products are those of the matrices that they stand for, in the module's dtype.

    Attributes:
        tensors: What is written to and attested, by canonical name; without a format, the parameters themselves.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.Tensor],
        form: Format | None = None,
        matrices: Mapping[str, tuple[int, ...]] | None = None,
    ) -> None:
        """Quantise what the module holds.

        Args:
            parameters: The module's canonical tensors.
            form: The format of matrices; None for all as they are.
            matrices: Shape of each matrix, by canonical name.

        Raises:
            EngineError: There are no matrices, or the module lacks one or has it in another shape.
            WeightSyncError: An element is not finite.
        """
        self._parameters: Final = parameters
        self._form: Final = form
        self._matrices: Final = {} if form is None else dict(matrices or {})
        if form is None:
            self.tensors: Mapping[str, torch.Tensor] = parameters
            return
        _check(parameters, self._matrices, form)
        self.tensors = quantise_tensors(form, parameters, self._matrices)
        self.settle()

    def settle(self) -> None:
        """Make the module's matrices of the codes and scales."""
        if self._form is None:
            return
        for name in self._matrices:
            parameter = self._parameters[name]
            for rows, values in dequantised_rows(self._form, name, self.tensors, parameter.shape[-1]):
                parameter[rows].copy_(values)

    def digest(self) -> str:
        """The digest of what is loaded, read back.

        Raises:
            AttestationError: A parameter is not, bit by bit, what its codes and scales stand for.
        """
        for name in self._matrices:
            self._check_parameter(name)
        return digest_of(self.tensors)

    def _check_parameter(self, name: str) -> None:
        assert self._form is not None
        parameter = self._parameters[name]
        for rows, values in dequantised_rows(self._form, name, self.tensors, parameter.shape[-1]):
            if not same_bits(parameter[rows], values.to(parameter.dtype)):
                raise AttestationError(
                    f"{name}: the parameter that products are computed with is not what its {self._form.name} codes "
                    "and scales stand for"
                )


def _check(parameters: Mapping[str, torch.Tensor], matrices: Mapping[str, tuple[int, ...]], form: Format) -> None:
    if not matrices:
        raise EngineError(
            f"rollout.quantization: {form.name!r}, but the model plugin names no matrices (ModelFacts.matrices); set "
            "it to 'none', or use a model plugin that names them"
        )
    for name, shape in matrices.items():
        found = tuple(parameters[name].shape) if name in parameters else None
        if found != tuple(shape):
            raise EngineError(
                f"{name}: the model's facts say that it is a matrix of shape {tuple(shape)}; the module has "
                f"{'none' if found is None else found}"
            )
