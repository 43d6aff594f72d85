"""Messages on a byte stream between a replica and its worker processes: each with its length before it."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final

from cosmos_core.errors import TransportError

_PREFIX: Final = struct.Struct("<I")
_LARGEST: Final = 1 << 30


def frame(data: bytes) -> bytes:
    """A message with its length before it.

    Raises:
        TransportError: It is longer than a frame may be.
    """
    if len(data) > _LARGEST:
        raise TransportError(f"a message of {len(data)} bytes to or from a worker is above {_LARGEST}")
    return _PREFIX.pack(len(data)) + data


class Unframer:
    """Cuts a byte stream into messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Take what arrived and yield each message that is complete.

        Raises:
            TransportError: A length is impossible.
        """
        self._buffer += data
        while len(self._buffer) >= _PREFIX.size:
            (size,) = _PREFIX.unpack_from(self._buffer)
            if size > _LARGEST:
                raise TransportError(f"a frame of {size} bytes from a worker is above {_LARGEST}")
            end = _PREFIX.size + size
            if len(self._buffer) < end:
                return
            message = bytes(self._buffer[_PREFIX.size : end])
            del self._buffer[:end]
            yield message
