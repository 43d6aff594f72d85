"""Walks the headers of a tar, and past what is broken of it.

Python's `tarfile` takes a broken header for the end of the archive, so that all behind it is lost without a word. Here
it is told, and the walk goes on at the next header that is sound.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterator, Mapping
from typing import BinaryIO, Final

import attrs

BLOCK: Final = 512
_ZEROS: Final = bytes(BLOCK)
_MAX_EXTENSION_BYTES: Final = 1 << 20
_COMPRESSED: Final = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd")
"""How gzip, bzip2, xz and zstd begin."""


@attrs.frozen(kw_only=True)
class Member:
    """A file in a tar.

    Attributes:
        name: Its path.
        offset: Where its bytes begin; its header is the block before.
        size: How many they are.
        checksum: That its header says, by which it is known again.
    """

    name: str
    offset: int
    size: int
    checksum: int


@attrs.frozen(kw_only=True)
class Torn:
    """Something that cannot be read.

    Attributes:
        offset: Where.
        reason: Why.
    """

    offset: int
    reason: str


def walk(file: BinaryIO, size: int) -> Iterator[Member | Torn]:
    """Every file of a tar, and what is broken of it, in order.

    Args:
        file: The tar; uncompressed, and it can seek.
        size: Bytes that it has.
    """
    offset: int | None = 0
    while offset is not None:
        block = _read(file, offset, BLOCK)
        if offset == 0 and block.startswith(_COMPRESSED):
            yield Torn(offset=0, reason="it is compressed, so that members cannot be read by themselves; unpack it")
            return
        if len(block) < BLOCK:
            yield Torn(offset=offset, reason="it ends without an end marker: it was cut off, or is still being written")
            return
        if block == _ZEROS:
            end, offset = offset, _next_header(file, offset + BLOCK)
            if offset is not None:
                yield Torn(offset=end, reason="there is more behind an end marker")
        elif header(block) is None:
            yield Torn(offset=offset, reason="there is no header of a member")
            offset = _next_header(file, offset + BLOCK)
        else:
            found, offset = _entry(file, offset, size)
            if found is not None:
                yield found


def _entry(file: BinaryIO, offset: int, size: int) -> tuple[Member | Torn | None, int | None]:
    """The member whose first header is at `offset`, None if it is no file, and where the next one is."""
    said = _Said()
    while (info := header(_read(file, offset, BLOCK))) is not None and info.type in _EXTENSIONS:
        said.add(info.type, _read(file, offset + BLOCK, min(info.size, _MAX_EXTENSION_BYTES)))
        offset = _after(offset + BLOCK, info.size)
    if info is None:
        return None, offset
    name, length, start = said.name or info.name, info.size if said.size is None else said.size, offset + BLOCK
    if not info.isreg():
        return None, _after(start, 0 if info.type in tarfile.SUPPORTED_TYPES else length)
    if start + length > size:
        return Torn(offset=offset, reason=f"{name} is cut off"), None
    return Member(name=name, offset=start, size=length, checksum=info.chksum), _after(start, length)


def _after(start: int, length: int) -> int:
    return start + -(-length // BLOCK) * BLOCK


def header(block: bytes) -> tarfile.TarInfo | None:
    """The header of a member in a block, if it is one, by its checksum."""
    try:
        found = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except tarfile.HeaderError:
        return None
    # With a negative size the walk would go back, and never end.
    return found if found.size >= 0 else None


_EXTENSIONS: Final = (
    tarfile.XHDTYPE,
    tarfile.SOLARIS_XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
)
"""Members that say something of the next one, or of all."""


class _Said:
    """The facts that members before give of the next one."""

    def __init__(self) -> None:
        self.name = ""
        self.size: int | None = None

    def add(self, kind: bytes, data: bytes) -> None:
        if kind == tarfile.GNUTYPE_LONGNAME:
            self.name = data.rstrip(b"\0").decode("utf-8", "surrogateescape")
        elif kind in {tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE}:
            records = _records(data)
            self.name = records.get("path", self.name)
            length = records.get("size", "")
            self.size = int(length) if length.isdecimal() else self.size


def _records(data: bytes) -> Mapping[str, str]:
    """The records of an extended header: `LENGTH KEY=VALUE` and a line break each (POSIX.1-2001, pax)."""
    found = {}
    while data:
        length, _, rest = data.partition(b" ")
        if not length.isdigit() or not len(length) < int(length) <= len(data):
            break
        key, _, value = rest[: int(length) - len(length) - 1].partition(b"=")
        found[key.decode("utf-8", "replace")] = value.removesuffix(b"\n").decode("utf-8", "surrogateescape")
        data = data[int(length) :]
    return found


def _next_header(file: BinaryIO, offset: int) -> int | None:
    """The offset of the next sound header."""
    while len(block := _read(file, offset, BLOCK)) == BLOCK:
        if block != _ZEROS and header(block) is not None:
            return offset
        offset += BLOCK
    return None


def _read(file: BinaryIO, offset: int, size: int) -> bytes:
    file.seek(offset)
    return file.read(size)
