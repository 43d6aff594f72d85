"""Embeddings of captions: files with one float tensor [L, E], L tokens of width E.

A safetensors file is used as it is. What has a leading 1 in its shape, or is a pickle, is converted to such a file in
the cache, so that whoever reads an embedding need not know of either.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, Final

import attrs
import numpy as np
from safetensors.numpy import save_file

from cosmos_core.data import BadRowError
from cosmos_dataset_world.clips.cache import LocalCache
from cosmos_dataset_world.clips.clip import PICKLES
from cosmos_dataset_world.clips.pickles import NotAnArrayError, read_array

TENSOR: Final = "text_embedding"
"""Name of the tensor in files that are converted."""

_DTYPE_BYTES: Final[Mapping[str, int]] = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_MAX_HEADER_BYTES: Final = 1 << 20
_LENGTH: Final = struct.Struct("<Q")


@attrs.frozen(kw_only=True)
class _Header:
    """The header of a safetensors file: its one tensor, and where the tensor's bytes begin and end in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def usable_embedding(path: Path, width: int | None, cache: LocalCache) -> Path:
    """The file to read an embedding from: itself, or a converted copy.

    Args:
        path: A safetensors file, or a pickle.
        width: That it must have; None if any will do.
        cache: Where converted copies are.

    Raises:
        BadRowError: It cannot be read, holds something else, or is of another width.
    """
    try:
        if path.name.endswith(PICKLES):
            return _of_pickle(path, width, cache)
        with path.open("rb") as file:
            header = _header(file, path)
    except OSError as error:
        raise BadRowError(f"{path.name} cannot be read: {error.strerror}", "an embedding cannot be read") from error
    if _is_led(header.shape):
        _check(path, header.shape[1:], width)
        return cache.get(_named(path), lambda partial: _drop_lead(path, header, partial))
    _check(path, header.shape, width)
    return path


def _of_pickle(path: Path, width: int | None, cache: LocalCache) -> Path:
    try:
        array = read_array(path)
    except NotAnArrayError as error:
        raise BadRowError(f"{path.name} is no pickle of one array: {error}", "an embedding cannot be read") from error
    if not np.issubdtype(array.dtype, np.floating):
        raise BadRowError(f"{path.name} has values of type {array.dtype}, not floats", "an embedding has no floats")
    array = array[0] if _is_led(array.shape) else array
    _check(path, array.shape, width)
    return cache.get(_named(path), lambda partial: save_file({TENSOR: np.ascontiguousarray(array)}, partial))


def _check(path: Path, shape: tuple[int, ...], width: int | None) -> None:
    if len(shape) != 2 or 0 in shape:
        raise BadRowError(
            f"{path.name} has an embedding of shape {shape}; give [tokens, width]", "an embedding of another shape"
        )
    if width is not None and shape[1] != width:
        raise BadRowError(
            f"{path.name} has an embedding of width {shape[1]}, and embedding_width is {width}",
            f"an embedding of width {shape[1]}",
        )


def _is_led(shape: tuple[int, ...]) -> bool:
    return len(shape) == 3 and shape[0] == 1


def _named(path: Path) -> str:
    stat = path.stat()
    said = repr((str(path), stat.st_size, stat.st_mtime_ns))
    return f"{hashlib.sha256(said.encode()).hexdigest()[:32]}.safetensors"


def _header(file: BinaryIO, path: Path) -> _Header:
    try:
        return _parsed(file, path.stat().st_size)
    except (struct.error, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise BadRowError(
            f"{path.name} is no usable safetensors file: {error}", "an embedding cannot be read"
        ) from error


def _parsed(file: BinaryIO, size_bytes: int) -> _Header:
    (length,) = _LENGTH.unpack(file.read(_LENGTH.size))
    if length > _MAX_HEADER_BYTES:
        raise ValueError(f"a header of {length:,} bytes")
    said: dict[str, Any] = json.loads(file.read(length))
    said.pop("__metadata__", None)
    if len(said) != 1:
        raise ValueError(f"{len(said)} tensors, where one is wanted")
    ((name, entry),) = said.items()
    begin, end = entry["data_offsets"]
    shape, dtype = tuple(entry["shape"]), str(entry["dtype"])
    if any(type(number) is not int for number in (begin, end, *shape)) or begin != 0:
        raise ValueError(f"bytes {begin} to {end} for shape {shape}")
    if dtype not in _DTYPE_BYTES:
        raise ValueError(f"values of type {dtype}, not floats")
    if min(shape, default=0) < 0 or end - begin != math.prod(shape) * _DTYPE_BYTES[dtype]:
        raise ValueError(f"{end - begin:,} bytes for shape {shape} of {dtype}")
    start = _LENGTH.size + length
    if start + end != size_bytes:
        raise ValueError(f"it has {size_bytes:,} bytes, and says that it has {start + end:,}")
    return _Header(name=name, dtype=dtype, shape=shape, begin=start + begin, end=start + end)


def _drop_lead(path: Path, header: _Header, target: Path) -> None:
    """Copy a file, its tensor without the leading 1 of its shape; the bytes of bfloat16 stay what they are."""
    with path.open("rb") as file:
        file.seek(header.begin)
        data = file.read(header.end - header.begin)
    said = {TENSOR: {"dtype": header.dtype, "shape": header.shape[1:], "data_offsets": [0, len(data)]}}
    encoded = json.dumps(said).encode()
    encoded += b" " * (-len(encoded) % 8)
    target.write_bytes(_LENGTH.pack(len(encoded)) + encoded + data)
