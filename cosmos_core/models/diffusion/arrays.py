"""Payloads of kind `latents` to tensors and back.

Shape legend: see `cosmos_core.protocols.denoising`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
import torch

from cosmos_core.errors import DataError
from cosmos_core.types import Array, Payload

KIND: Final = "latents"


def array_of(tensor: torch.Tensor) -> Array:
    """A tensor as payloads hold it: contiguous, on the CPU."""
    plain = tensor.detach().to("cpu").contiguous()
    return Array(dtype=str(plain.dtype).removeprefix("torch."), shape=tuple(plain.shape), data=plain.numpy().tobytes())


def payload_of(tensors: Mapping[str, torch.Tensor]) -> Payload:
    """A payload of some tensors."""
    return Payload(kind=KIND, arrays={name: array_of(tensor) for name, tensor in tensors.items()})


def with_tensors(payload: Payload, tensors: Mapping[str, torch.Tensor]) -> Payload:
    """The payload with more arrays, or others in their place."""
    return Payload(
        kind=payload.kind, arrays={**payload.arrays, **{name: array_of(each) for name, each in tensors.items()}}
    )


def has(payload: Payload, name: str) -> bool:
    """Tell whether there is such an array."""
    return name in payload.arrays


def tensor_of(payload: Payload, name: str, dtype: torch.dtype, shape: tuple[int | None, ...]) -> torch.Tensor:
    """A copy of an array, as a tensor on the CPU.

    Args:
        payload: Of kind `latents`.
        name: Of the array.
        dtype: That it must have.
        shape: That it must have; None for dims of any size.

    Raises:
        DataError: The payload is of another kind, has no such array, or the array is of another dtype or shape.
    """
    if payload.kind != KIND:
        raise DataError(f"a payload of kind {payload.kind!r}, and a world model takes {KIND!r}")
    array = payload.arrays.get(name)
    if array is None:
        raise DataError(
            f"a payload of latents without the array {name!r}: it has {', '.join(payload.arrays) or 'none'}"
        )
    fits = len(array.shape) == len(shape) and all(
        wanted is None or found == wanted for found, wanted in zip(array.shape, shape, strict=True)
    )
    if array.dtype != str(dtype).removeprefix("torch.") or not fits:
        wanted_shape = ", ".join("any" if size is None else str(size) for size in shape)
        raise DataError(
            f"the array {name!r} is {array.dtype} {list(array.shape)}, and must be "
            f"{str(dtype).removeprefix('torch.')} [{wanted_shape}]"
        )
    flat = np.frombuffer(array.data, dtype=np.dtype(array.dtype)).reshape(array.shape)
    return torch.from_numpy(flat.copy())
