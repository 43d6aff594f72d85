"""Arrays in npy files: read in place, nothing believed, nothing executed."""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Mapping
from typing import Final

from cosmos_core.types import Array
from cosmos_core.types.payload import ITEM_SIZES

_NPY: Final = b"\x93NUMPY"
_LONGEST_HEADER: Final = 1 << 12
_HEADER: Final = re.compile(
    rb"\s*\{\s*'descr':\s*'([^']*)',\s*'fortran_order':\s*(True|False),\s*'shape':\s*\(([\d,\s]*)\),?\s*\}\s*"
)
_DESCRIPTIONS: Final[Mapping[str, str]] = {"|u1": "uint8", "<f2": "float16", "<f4": "float32"}


def is_npy(data: bytes | memoryview) -> bool:
    """True if it begins like an npy file."""
    return bytes(data[: len(_NPY)]) == _NPY


def read_npy(data: bytes | memoryview) -> Array:
    """The array of an npy file, whose header is read by its form and not as Python.

    Nothing is allocated for what the header claims: its bytes are there, or it is refused.

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
        raise ValueError(f"an npy file of dtype {descr}; give uint8, or little-endian float16 or float32")
    values = memoryview(data)[begin:]
    needed = math.prod(shape) * ITEM_SIZES[dtype]
    if values.nbytes != needed:
        raise ValueError(f"an npy file of {dtype} {shape} with {values.nbytes} bytes instead of {needed}")
    if order == "True":
        import numpy as np  # noqa: PLC0415 - nothing else of this package needs it

        values = memoryview(np.frombuffer(values, dtype).reshape(shape, order="F").tobytes())
    return Array(dtype=dtype, shape=shape, data=values)
