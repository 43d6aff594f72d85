"""Arrays of a request's body, npy or safetensors: read in place, nothing believed, nothing executed."""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import safetensors

from cosmos_core.types import Array
from cosmos_core.types.payload import ITEM_SIZES

_NPY: Final = b"\x93NUMPY"
_LONGEST_HEADER: Final = 1 << 12
_HEADER: Final = re.compile(
    rb"\s*\{\s*'descr':\s*'([^']*)',\s*'fortran_order':\s*(True|False),\s*'shape':\s*\(([\d,\s]*)\),?\s*\}\s*"
)
_DESCRIPTIONS: Final[Mapping[str, str]] = {"|u1": "uint8", "<f2": "float16", "<f4": "float32"}
_DTYPES: Final[Mapping[str, str]] = {"U8": "uint8", "F16": "float16", "BF16": "bfloat16", "F32": "float32"}
"""Those that frames or latents may have, as safetensors calls them."""


def is_npy(data: bytes | memoryview) -> bool:
    """Whether it begins like an npy file."""
    return bytes(data[: len(_NPY)]) == _NPY


def read_npy(data: bytes | memoryview) -> Array:
    """The array of an npy file, whose header is read by its form and not as Python.

    Raises:
        ValueError: It is none, of another dtype than uint8, float16 and float32, or cut off.
    """
    # Formats 2 and 3 have a longer length of the header.
    prefix = struct.Struct("<6sBBH" if bytes(data[6:7]) == b"\x01" else "<6sBBI")
    if len(data) < prefix.size:
        raise ValueError("no npy file: it has no header")
    magic, major, _, length = prefix.unpack_from(data)
    begin = prefix.size + length
    found = _HEADER.fullmatch(data[prefix.size : begin]) if length <= _LONGEST_HEADER else None
    if magic != _NPY or major not in (1, 2, 3) or found is None:
        raise ValueError(f"no npy file that is read here: {bytes(data[:100])!r}")
    descr, order, dims = (bytes(each).decode() for each in found.groups())
    shape = tuple(int(each) for each in dims.split(",") if each.strip())
    dtype = _DESCRIPTIONS.get(descr)
    if dtype is None:
        raise ValueError(f"an npy file of dtype {descr}; send uint8, or little-endian float16 or float32")
    values = memoryview(data)[begin:]
    needed = math.prod(shape) * ITEM_SIZES[dtype]
    if values.nbytes != needed:
        raise ValueError(f"an npy file of {dtype} {shape} with {values.nbytes} bytes instead of {needed}")
    if order == "True":
        values = memoryview(np.frombuffer(values, dtype).reshape(shape, order="F").tobytes())
    return Array(dtype=dtype, shape=shape, data=values)


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


def rows_of(array: Array) -> list[Array]:
    """The parts of an array along its first dim, in place.

    Raises:
        ValueError: It has no dims.
    """
    if not array.shape:
        raise ValueError("an array without dims; the first one is the batch")
    number, shape = array.shape[0], array.shape[1:]
    size = array.nbytes // max(1, number)
    view = memoryview(array.data).cast("B") if array.nbytes else memoryview(b"")
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
