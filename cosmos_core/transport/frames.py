"""Payloads as frames: a header that describes arrays, and the frames in which their bytes lie.

Frame 0 holds all small arrays, one after another; each large array is a frame of its own. So a group of token
sequences is two parts on the wire, and a large array is never copied, neither in nor out. What the payloads of a lease
share, such as what conditions a group of videos, lies there once. Arrays that cannot be sent, and headers that do not
fit their frames, are `TransportError`s.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Final, TypeAlias

import attrs
import msgspec

from cosmos_core.errors import TransportError
from cosmos_core.transport.codec import Codec
from cosmos_core.transport.sockets import BULK
from cosmos_core.types import Array, Payload
from cosmos_core.types.payload import ITEM_SIZES

MAX_FRAMES: Final = 4096
"""Most frames of one lease."""

_OWN_FRAME_BYTES: Final = 64 << 10
"""From this size on an array is a frame of its own; pyzmq copies smaller ones anyway (`zmq.COPY_THRESHOLD`)."""

_ALIGNMENT: Final = 16

Size: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]
Buffer: TypeAlias = bytes | memoryview


@attrs.frozen(kw_only=True)
class ArrayHeader:
    """The place of an array: from `offset` of frame `frame` on, for as long as dtype and shape say."""

    name: str
    dtype: str
    shape: tuple[Size, ...]
    frame: Size
    offset: Size


@attrs.frozen(kw_only=True)
class PayloadHeader:
    """One payload."""

    kind: str
    arrays: tuple[ArrayHeader, ...]


@attrs.frozen(kw_only=True)
class Fetch:
    """Client to server: send what is held under these leases."""

    token: str
    """Of the endpoint; another process that was given an old port later does not have it."""
    request: int
    leases: tuple[int, ...]


@attrs.frozen(kw_only=True)
class Found:
    """Server to client: the payloads of a lease; its frames follow in the same message."""

    request: int
    lease: int
    payloads: tuple[PayloadHeader, ...]


@attrs.frozen(kw_only=True)
class Absent:
    """Server to client: nothing is held under these leases."""

    request: int
    leases: tuple[int, ...]


REQUESTS: Final = Codec((Fetch,))
REPLIES: Final = Codec((Found, Absent))


@attrs.frozen(kw_only=True, eq=False)
class Packed:
    """Payloads ready to be sent."""

    payloads: tuple[PayloadHeader, ...]
    frames: tuple[Buffer, ...]

    @property
    def nbytes(self) -> int:
        """Size of the frames in bytes."""
        return sum(len(frame) for frame in self.frames)


def pack(payloads: Sequence[Payload]) -> Packed:
    """Lay payloads out in frames. Arrays of 64 KiB and more are referred to, smaller ones copied; each object once."""
    small = bytearray()
    large: list[Buffer] = []
    headers = []
    placed: dict[int, tuple[int, int]] = {}
    for payload in payloads:
        arrays = []
        for name, array in payload.arrays.items():
            if id(array) not in placed:
                data = _flat(name, array)
                if len(data) >= _OWN_FRAME_BYTES:
                    large.append(data)
                    placed[id(array)] = len(large), 0
                else:
                    placed[id(array)] = 0, len(small)
                    small += data
                    small += bytes(-len(small) % _ALIGNMENT)
            frame, offset = placed[id(array)]
            arrays.append(ArrayHeader(name=name, dtype=array.dtype, shape=array.shape, frame=frame, offset=offset))
        headers.append(PayloadHeader(kind=payload.kind, arrays=tuple(arrays)))
    if len(large) >= MAX_FRAMES:
        raise TransportError(f"{len(large)} large arrays under one lease; at most {MAX_FRAMES - 1} can be sent")
    return Packed(payloads=tuple(headers), frames=(bytes(small), *large))


def unpack(headers: Sequence[PayloadHeader], frames: Sequence[memoryview]) -> list[Payload]:
    """Make payloads whose arrays are read-only views of `frames`; an array may start at any address.

    Arrays of one place, dtype and shape are one object.
    """
    views = [frame.toreadonly() for frame in frames]
    found: dict[tuple[int, int, str, tuple[int, ...]], Array] = {}

    def array_of(header: ArrayHeader) -> Array:
        place = header.frame, header.offset, header.dtype, header.shape
        if place not in found:
            found[place] = _view(header, views)
        return found[place]

    return [
        Payload(kind=header.kind, arrays={array.name: array_of(array) for array in header.arrays}) for header in headers
    ]


def _flat(name: str, array: Array) -> Buffer:
    if isinstance(array.data, bytes):
        data: Buffer = array.data
    else:
        data = array.data.cast("B") if array.nbytes else b""
    if len(data) > BULK.part_bytes:
        raise TransportError(
            f"array {name!r} has {len(data)} bytes; at most {BULK.part_bytes} can be sent in one array"
        )
    return data


def _view(header: ArrayHeader, views: Sequence[memoryview]) -> Array:
    if header.frame >= len(views):
        raise TransportError(f"array {header.name!r} is said to be in frame {header.frame} of {len(views)}")
    item_size = ITEM_SIZES.get(header.dtype, 0)
    end = header.offset + math.prod(header.shape) * item_size
    try:
        # A range beyond the frame is cut short by the slice, and an unknown dtype has no size: Array refuses both.
        return Array(dtype=header.dtype, shape=header.shape, data=views[header.frame][header.offset : end])
    except ValueError as error:
        raise TransportError(f"array {header.name!r}: {error}") from None
