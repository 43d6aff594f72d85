"""Token payloads: the `tokens` envelope to NumPy and back, without copying where the bytes allow it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeAlias

import attrs
import numpy as np
import numpy.typing as npt

from cosmos_core.errors import DataError
from cosmos_core.types import Array, Payload

KIND: Final = "tokens"
KINDS: Final = "kinds"
"""The array that says which units are seen (see `cosmos_core.types.Payload`)."""
Ids: TypeAlias = Sequence[int] | npt.NDArray[np.int32]


def array_of(data: npt.NDArray[np.generic]) -> Array:
    """An array as payloads hold it."""
    return Array(dtype=str(data.dtype), shape=data.shape, data=np.ascontiguousarray(data).tobytes())


def token_array(ids: Ids) -> Array:
    """Token ids as an int32 [len] array."""
    return array_of(np.asarray(ids, dtype=np.int32))


def tokens_payload(prompt: Ids, completion: Ids | None = None) -> Payload:
    """A payload of a prompt, and of its completion if there is one."""
    given = {"prompt": prompt, "completion": completion}
    return Payload(kind=KIND, arrays={name: token_array(ids) for name, ids in given.items() if ids is not None})


def with_completion(payload: Payload, completion: Ids | None) -> Payload:
    """The payload of a prompt, with its completion if there is one."""
    if completion is None:
        return payload
    return attrs.evolve(payload, arrays={**payload.arrays, "completion": token_array(completion)})


def values(payload: Payload, name: str) -> npt.NDArray[np.generic]:
    """A read-only view of the 1-D array `name`.

    Raises:
        DataError: The payload is not of tokens, or has no such array.
    """
    array = payload.arrays.get(name) if payload.kind == KIND else None
    if array is None:
        held = ", ".join(payload.arrays) or "nothing"
        raise DataError(f"a payload of kind {payload.kind!r} with {held} has no tokens array {name!r}")
    return np.frombuffer(array.data, dtype=np.dtype(array.dtype))


def decided(payload: Payload) -> npt.NDArray[np.bool_]:
    """The units of the completion that the model decided, bool [C]: all, unless the payload says otherwise.

    Raises:
        DataError: It does not say so of each unit.
    """
    shape = values(payload, "completion").shape
    if "decided" not in payload.arrays:
        return np.ones(shape, np.bool_)
    told = values(payload, "decided")
    if told.dtype != np.bool_ or told.shape != shape:
        raise DataError(
            f"`decided` is {told.dtype} {list(told.shape)} of a completion {list(shape)}; it is one bool a unit"
        )
    return told.astype(np.bool_, copy=False)


def view(payload: Payload, name: str) -> npt.NDArray[np.generic]:
    """A read-only view of the array `name`, in its shape."""
    return values(payload, name).reshape(payload.arrays[name].shape)
