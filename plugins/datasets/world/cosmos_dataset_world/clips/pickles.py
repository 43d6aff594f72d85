"""Reads one array out of a pickle, and cannot do anything else.

A pickle may call whatever it names. Here the names that NumPy and torch write for arrays stand for functions of this
module, which only keep what is said and make an array of it; any other name ends the reading.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
import reprlib
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

MAX_BYTES: Final = 1 << 28
"""Of a pickle; the embedding of 512 tokens of width 100,352 in float32 has fewer."""

_MAX_LEVELS: Final = 3
"""Of lists, tuples and dicts around an array."""

_MAX_STEPS: Final = 10_000
"""Of a pickle; one of an array has fewer than 100."""

_MEMO_STEPS: Final = ("PUT", "BINPUT", "LONG_BINPUT")
"""They say where in the memo a value is kept. `pickle` makes room up to there, however far it is."""

_DAMAGE: Final = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    EOFError,
    LookupError,
    MemoryError,
    RuntimeError,  # of torch, and RecursionError
    TypeError,
)


class NotAnArrayError(Exception):
    """A pickle is not read, for the reason given."""


def read_array(path: Path) -> np.ndarray[Any, Any]:
    """The array of a pickle: NumPy's or torch's, alone or in up to three lists, tuples or dicts of one item.

    bfloat16 becomes float32.

    Raises:
        NotAnArrayError: It has something else in it, is damaged or too large.
        OSError: It cannot be read.
    """
    size = path.stat().st_size
    if size > MAX_BYTES:
        raise NotAnArrayError(f"it has {size:,} bytes, more than {MAX_BYTES:,}")
    try:
        data = path.read_bytes()
        _check_steps(data)
        found = _Reader(io.BytesIO(data)).load()
        for _ in range(_MAX_LEVELS):
            if isinstance(found, list | tuple | dict) and len(found) == 1:
                (found,) = found.values() if isinstance(found, dict) else found
        return _array(found)
    except (pickle.UnpicklingError, ValueError, *_DAMAGE) as error:
        raise NotAnArrayError(str(error) or type(error).__name__) from error


def _check_steps(data: bytes) -> None:
    """Refuse what takes more time or memory than an array has use for, before it is done.

    Raises:
        NotAnArrayError: There is such a step, or there are too many.
        ValueError: It is no pickle, or cut off.
    """
    for number, (step, value, _) in enumerate(pickletools.genops(data)):
        if number == _MAX_STEPS:
            raise NotAnArrayError(f"it has more than {_MAX_STEPS:,} steps, and an array needs fewer than 100")
        if step.name in _MEMO_STEPS and isinstance(value, int) and value >= _MAX_STEPS:
            raise NotAnArrayError(f"it keeps a value at place {value:,} of the memo, which no array needs")


def _array(found: Any) -> np.ndarray[Any, Any]:
    if isinstance(found, _Array):
        return found.made()
    if isinstance(found, np.ndarray):
        return found
    raise NotAnArrayError(f"it holds a {type(found).__name__}, and one array is wanted")


class _Type:
    """In place of `numpy.dtype`."""

    def __init__(self, name: Any = "", *_: Any) -> None:
        self.name = name
        self.order: Any = "="

    def __setstate__(self, state: Any) -> None:
        self.order = state[1]

    def made(self) -> np.dtype[Any]:
        if not isinstance(self.name, str) or self.name[:1] not in {"f", "i", "u", "b"}:
            raise NotAnArrayError(f"an array of {reprlib.repr(self.name)}, not of numbers")
        return np.dtype(self.name).newbyteorder(self.order)


class _Array:
    """In place of an array that is not filled yet."""

    def __init__(self, *_: Any) -> None:
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def made(self) -> np.ndarray[Any, Any]:
        _, shape, kind, is_fortran, data = self.state
        return _filled(data, kind, shape, "F" if is_fortran else "C")


def _filled(data: Any, kind: Any, shape: Any, order: Any) -> np.ndarray[Any, Any]:
    if not isinstance(data, bytes | bytearray) or not isinstance(kind, _Type) or order not in {"C", "F"}:
        raise NotAnArrayError("an array whose values are objects")
    return np.frombuffer(data, kind.made()).reshape([int(size) for size in shape], order=order)


def _encoded(text: Any, encoding: Any) -> bytes:
    """In place of `_codecs.encode`, by which old pickles hold bytes."""
    if not isinstance(text, str) or encoding != "latin1":
        raise NotAnArrayError(f"bytes in the encoding {reprlib.repr(encoding)}")
    return text.encode("latin1")


def _torch_storage(data: Any) -> Any:
    """In place of `torch.storage._load_from_bytes`, which would unpickle what it is given: bytes, and their dtype."""
    import torch  # noqa: PLC0415 - only for pickles of tensors

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of formats, to whoever wrote them
        storage = torch.load(io.BytesIO(data), weights_only=True)
        return storage.untyped(), storage.dtype


def _torch_tensor(storage: Any, offset: Any, size: Any, stride: Any, *_: Any) -> np.ndarray[Any, Any]:
    import torch  # noqa: PLC0415

    sizes, strides, first = [int(n) for n in size], [int(n) for n in stride], int(offset)
    values, dtype = storage
    num_values = values.nbytes() // dtype.itemsize
    last = first + sum((n - 1) * step for n, step in zip(sizes, strides, strict=True))
    if math.prod(sizes) > num_values or min([first, *sizes, *strides]) < 0 or last >= num_values:
        raise NotAnArrayError(f"a tensor of shape {sizes} and strides {strides} in {num_values} values")
    tensor = torch.empty(0, dtype=dtype).set_(values, first, sizes, strides)
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.float()
    found: np.ndarray[Any, Any] = tensor.contiguous().numpy()
    return found


class _Function:
    """A function that a pickle may call, and do nothing else to: it sets attributes of what it has named."""

    __slots__ = ("_called",)

    def __init__(self, called: Callable[..., Any]) -> None:
        self._called = called

    def __call__(self, *arguments: Any) -> Any:
        return self._called(*arguments)

    def __setstate__(self, _: Any) -> None:
        raise NotAnArrayError("it sets attributes of a function")


_STAND_INS: Final[Mapping[tuple[str, str], Any]] = {
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Type,
    **{
        (f"numpy.{package}.{module}", name): stand_in
        for package in ("core", "_core")
        for module, name, stand_in in (
            ("multiarray", "_reconstruct", _Array),
            ("numeric", "_frombuffer", _Function(_filled)),
        )
    },
    ("_codecs", "encode"): _Function(_encoded),
    ("collections", "OrderedDict"): _Function(dict),
    ("torch._utils", "_rebuild_tensor_v2"): _Function(_torch_tensor),
    ("torch.storage", "_load_from_bytes"): _Function(_torch_storage),
}


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _STAND_INS[module, name]
        except KeyError:
            raise NotAnArrayError(f"it names {module}.{name}, which no array needs; it is not trusted") from None
