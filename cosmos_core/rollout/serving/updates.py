"""Weights in place: what the engine holds, an update being written, and its commit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import torch

from cosmos_core.errors import AttestationError, EngineError, WeightSyncError
from cosmos_core.protocols import TensorSlice
from cosmos_core.protocols.quantization import Format
from cosmos_core.weights import slices
from cosmos_core.weights.digest import BITS, digest_of
from cosmos_core.weights.quantization import dequantised_rows, quantise_tensors
from cosmos_core.weights.shards import dtype_name
from cosmos_core.weights.staging import upload
from cosmos_core.weights.storages import Storages


def whole_layout(tensors: Mapping[str, torch.Tensor]) -> list[tuple[TensorSlice, str]]:
    """Every tensor as one slice, with its dtype's name."""
    return [(slices.whole(name, tuple(tensor.shape)), dtype_name(tensor.dtype)) for name, tensor in tensors.items()]


class Update:
    """Slices written between `begin_update` and `commit_update`."""

    def __init__(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        self.version = version
        self._tensors = tensors
        self._pieces: dict[str, list[tuple[TensorSlice, torch.Tensor]]] = {}

    def write_to(self, rank: int, piece: TensorSlice, data: torch.Tensor) -> None:
        """Take a slice for a rank."""
        if rank != 0:
            raise WeightSyncError(f"rank {rank} does not exist: this engine has rank 0 only")
        self.write(piece, data)

    def write(self, piece: TensorSlice, data: torch.Tensor) -> None:
        """Take a slice.

        Raises:
            WeightSyncError: It is not a slice of a tensor held here, or `data` has another shape.
        """
        self._check_slice(piece, data)
        self._pieces.setdefault(piece.name, []).append((piece, data))

    def _check_slice(self, piece: TensorSlice, data: torch.Tensor) -> None:
        tensor = self._tensors.get(piece.name)
        if tensor is None:
            raise WeightSyncError(f"update to version {self.version}: {piece.name!r} is not a tensor of this model")
        if tuple(data.shape) != piece.shape:
            raise WeightSyncError(f"{piece.name}: data of shape {tuple(data.shape)} for a slice of {piece.shape}")
        if not slices.contains(slices.whole(piece.name, tuple(tensor.shape)), piece):
            raise WeightSyncError(
                f"{piece.name}: a slice of {piece.shape} at {piece.start} is not in a tensor of {tuple(tensor.shape)}"
            )

    def check(self) -> None:
        """Raise WeightSyncError unless every element of every tensor was written."""
        lacking = [
            name
            for name, tensor in self._tensors.items()
            if not covers([piece for piece, _ in self._pieces.get(name, ())], tuple(tensor.shape))
        ]
        if lacking:
            raise WeightSyncError(
                f"update to version {self.version}: {len(lacking)} of {len(self._tensors)} tensors are not wholly "
                f"written, the first is {lacking[0]!r}"
            )

    def close(self) -> None:
        """Let go of what was written. Idempotent."""
        self._pieces.clear()

    def apply(self) -> None:
        """Copy everything in."""
        with torch.no_grad():
            upload((self._place(piece), data) for pieces in self._pieces.values() for piece, data in pieces)

    def _place(self, piece: TensorSlice) -> torch.Tensor:
        tensor = self._tensors[piece.name]
        return tensor[slices.within(piece, slices.whole(piece.name, tuple(tensor.shape)))]


def covers(pieces: Sequence[TensorSlice], shape: tuple[int, ...]) -> bool:
    """True if slices cover a tensor."""
    rest = [] if 0 in shape else [slices.whole("", shape)]
    for piece in pieces:
        rest = [part for each in rest for part in slices.without(each, piece)]
    return not rest


def same_bits(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Compare shape, dtype and bits of two tensors on the first one's device: NaN equals itself, -0 is not 0."""
    if found.dtype != expected.dtype or found.shape != expected.shape:
        return False
    bits = BITS[found.element_size()]
    return torch.equal(found.contiguous().view(bits), expected.contiguous().view(bits).to(found.device))


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
        """Quantise what the module holds, by canonical name; without a format, all is as it is.

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
        self.dequantise()

    def dequantise(self) -> None:
        """Make the module's matrices of the codes and scales."""
        if self._form is None:
            return
        for name in self._matrices:
            parameter = self._parameters[name]
            for rows, values in dequantised_rows(self._form, name, self.tensors, parameter.shape[-1]):
                parameter[rows].copy_(values)

    def storages(self) -> Storages:
        """The memory of all of it."""
        tensors = (*self.tensors.values(), *self._parameters.values())
        return Storages(tensors, tensors[0].device)

    def digest(self) -> str:
        """The digest of what is loaded, read back."""
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
