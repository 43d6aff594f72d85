"""Rows that are costly to encode, read once among the processes that share sequences.

A video goes through an autoencoder, which takes seconds, and its latents are a few MB: processes of one `cp` axis
encode different rows and pass them on, one each at a time, so that no more than a row of each is on the way.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import msgspec

from cosmos_core.models.parallel.channel import Channel
from cosmos_core.policy.batches.rows import Read, Row, RowReader
from cosmos_core.protocols import Mesh
from cosmos_core.transport.frames import PayloadHeader, pack, unpack
from cosmos_core.types import Payload


@attrs.frozen(kw_only=True)
class _Passed:
    """A row that another process has read.

    Attributes:
        read: What it amounts to.
        headers: Of its payload; none where it cannot be used.
        frames: Bytes of that.
    """

    read: Read
    headers: tuple[PayloadHeader, ...]
    frames: tuple[bytes, ...]


def look_together(reader: RowReader, rows: Mapping[int, Row], mesh: Mesh) -> dict[int, Read]:
    """What rows amount to, each read by one of the processes along `cp`; afterwards all of them have it.

    Args:
        reader: This process's.
        rows: By index; the same on each of these processes, which all call it.
        mesh: The processes.
    """
    size = mesh.size("cp")
    if size == 1:
        return {index: reader.look(row) for index, row in rows.items()}
    channel, place = Channel(mesh.group("cp")), mesh.place("cp")
    # Rows that are learned at several points are read once.
    different = [*{row.key: row for row in rows.values()}.values()]
    reads: dict[tuple[object, ...], Read] = {}
    for first in range(0, len(different), size):
        turn = different[first : first + size]
        own = reader.look(turn[place]) if place < len(turn) else None
        said = channel.exchange(b"" if own is None else _told(own, reader.held(turn[place])))
        for number, (row, data) in enumerate(zip(turn, said, strict=False)):
            if number == place and own is not None:
                reads[row.key] = own
            else:
                reads[row.key] = _taken(reader, row, data)
    return {index: reads[row.key] for index, row in rows.items()}


def _told(read: Read, payload: Payload | None) -> bytes:
    packed = pack([] if payload is None else [payload])
    frames = tuple(bytes(frame) for frame in packed.frames)
    return msgspec.msgpack.encode(_Passed(read=read, headers=packed.payloads, frames=frames))


def _taken(reader: RowReader, row: Row, data: bytes) -> Read:
    passed = msgspec.msgpack.decode(data, type=_Passed)
    for payload in unpack(passed.headers, [memoryview(frame) for frame in passed.frames]):
        reader.keep(row, payload)
    return passed.read
