"""Bytes of any length between processes that can only exchange tensors of one length."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

SMALL_BYTES: Final = 1024
"""Messages up to this size are exchanged in one round."""

_HEAD: Final = 8


def all_gathered(data: bytes, gather: Callable[[bytearray], list[bytes]]) -> list[bytes]:
    """Give each process's bytes to every process, in the order of `gather`.

    Args:
        data: This process's.
        gather: Gives a buffer, as long on each process, to all.
    """
    first = gather(_framed(data[:SMALL_BYTES], len(data), SMALL_BYTES))
    sizes = [int.from_bytes(part[:_HEAD], "little") for part in first]
    longest = max(sizes)
    parts = first if longest <= SMALL_BYTES else gather(_framed(data, len(data), longest))
    return [part[_HEAD : _HEAD + size] for part, size in zip(parts, sizes, strict=True)]


def broadcasted(data: bytes, broadcast: Callable[[bytearray], bytes]) -> bytes:
    """Give the bytes of the process that `broadcast` starts from to every process.

    Args:
        data: Of that process; of the others ignored, and not sent.
        broadcast: Overwrites a buffer, as long on each process, with that process's.
    """
    first = broadcast(_framed(data[:SMALL_BYTES], len(data), SMALL_BYTES))
    size = int.from_bytes(first[:_HEAD], "little")
    # Elsewhere than where the bytes come from, the frame only makes room.
    whole = first if size <= SMALL_BYTES else broadcast(_framed(data[:size], size, size))
    return whole[_HEAD : _HEAD + size]


def _framed(data: bytes, size: int, room: int) -> bytearray:
    """The whole message's size in 8 bytes, then what there is of it, padded to `room`."""
    return bytearray(size.to_bytes(_HEAD, "little") + data.ljust(room, b"\0"))
