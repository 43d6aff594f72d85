"""Arrays of a request's body: safetensors, and what is made of arrays; npy is `cosmos_core.data.npy`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import safetensors

from cosmos_core.types import Array

_DTYPES: Final[Mapping[str, str]] = {"U8": "uint8", "F16": "float16", "BF16": "bfloat16", "F32": "float32"}
"""Those that frames or latents may have, as safetensors calls them."""


def read_safetensors(data: bytes | memoryview) -> dict[str, Array]:
    """The arrays of a safetensors file, by name.

    Raises:
        ValueError: It is none, or one of them has another dtype than uint8, float16, bfloat16 and float32.
    """
    try:
        found: list[tuple[str, dict[str, Any]]] = safetensors.deserialize(bytes(data))  # type: ignore[no-untyped-call]
    except safetensors.SafetensorError as error:
        raise ValueError(f"no safetensors file: {error}") from None
    arrays: dict[str, Array] = {}
    for name, each in found:
        if each["dtype"] not in _DTYPES:
            raise ValueError(f"array {name!r:.100} has dtype {each['dtype']}; send uint8, float16, bfloat16 or float32")
        arrays[name] = Array(dtype=_DTYPES[each["dtype"]], shape=tuple(each["shape"]), data=bytes(each["data"]))
    return arrays


def rows_of(array: Array, number: int) -> list[Array]:
    """The parts of an array along its first dim, in place.

    Args:
        array: The array.
        number: How many parts it must have.

    Raises:
        ValueError: It has no dims or one of 0, or another number of parts.
    """
    if not array.shape:
        raise ValueError("an array without dims; the first one is the batch")
    # A file without values can claim rows without end.
    if 0 in array.shape:
        raise ValueError(f"an array of shape {array.shape} has no values")
    if array.shape[0] != number:
        raise ValueError(f"an array of {array.shape[0]} rows for {number} completions")
    shape, size = array.shape[1:], array.nbytes // number
    view = memoryview(array.data).cast("B")
    return [
        Array(dtype=array.dtype, shape=shape, data=view[index * size : (index + 1) * size]) for index in range(number)
    ]


def as_float32(array: Array) -> Array:
    """The same numbers in float32."""
    if array.dtype == "float32":
        return array
    if array.dtype == "bfloat16":
        values = (np.frombuffer(array.data, "<u2").astype("<u4") << 16).view("<f4")
    else:
        values = np.frombuffer(array.data, "<f2").astype("<f4")
    return Array(dtype="float32", shape=array.shape, data=values.tobytes())
