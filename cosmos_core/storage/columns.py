"""Makes columns of Arrow from values without pandas, which pyarrow imports to look at a list: half a second."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np


def column(kind: Any, values: Sequence[Any] | np.ndarray[Any, Any]) -> Any:
    """Make a `pyarrow.Array` of a `pyarrow.DataType` (numbers, text, and lists and maps of these); None is null.

    Raises:
        Exception: A value that is none of the kind, by what numpy or pyarrow say of it.
    """
    import pyarrow as pa  # noqa: PLC0415 - where samples are written or read

    if isinstance(values, np.ndarray):
        return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(_numbers(kind, values))])
    valid = np.array([value is not None for value in values], bool)
    mask = None if valid.all() else pa.py_buffer(_bits(valid))
    if pa.types.is_string(kind):
        texts = [b"" if value is None else value.encode() for value in values]
        held = [_offsets(texts), b"".join(texts)]
    elif pa.types.is_list(kind) or pa.types.is_map(kind):
        lists = [() if value is None else value for value in values]
        child = _children(pa, kind, lists)
        return pa.Array.from_buffers(kind, len(lists), [mask, pa.py_buffer(_offsets(lists))], children=[child])
    elif pa.types.is_boolean(kind):
        held = [_bits(np.array([bool(value) for value in values], bool))]
    else:
        held = [_numbers(kind, [0 if value is None else value for value in values])]
    return pa.Array.from_buffers(kind, len(values), [mask, *map(pa.py_buffer, held)])


def _children(pa: Any, kind: Any, lists: Sequence[Any]) -> Any:
    """The values of all lists, or the pairs of all maps, as one array."""
    if pa.types.is_map(kind):
        pairs = [*itertools.chain.from_iterable(lists)]
        pair = pa.struct([kind.key_field, kind.item_field])
        parts = [column(part.type, [each[place] for each in pairs]) for place, part in enumerate(pair)]
        return pa.Array.from_buffers(pair, len(pairs), [None], children=parts)
    filled = [each for each in lists if len(each)]
    if filled and all(isinstance(each, np.ndarray) for each in filled):
        return column(kind.value_type, np.concatenate(filled))
    return column(kind.value_type, [*itertools.chain.from_iterable(lists)])


def _numbers(kind: Any, values: Sequence[Any] | np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    wanted = np.dtype(f"{'f' if str(kind) in {'float', 'double'} else 'i'}{kind.bit_width // 8}")
    given = np.asarray(values)
    # numpy would cut these off without a word; of numbers of Python's it refuses those that are too large itself.
    is_cut = wanted.kind == "i" and given.dtype.kind not in "iu"
    if len(given) and (not np.can_cast(given.dtype, wanted) if given is values else is_cut):
        raise TypeError(f"{given.dtype} does not fit {kind}")
    return np.ascontiguousarray(values, wanted)


def _bits(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.packbits(values, bitorder="little")


def _offsets(values: Sequence[Any]) -> np.ndarray[Any, Any]:
    return np.fromiter(itertools.accumulate(map(len, values), initial=0), np.int32, len(values) + 1)
