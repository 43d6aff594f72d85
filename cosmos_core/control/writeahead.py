"""The log that SQLite keeps beside the journal (`-wal`): whether commits in it are lost.

SQLite reads the log up to the first frame without its checksum and takes that for the end, since a crash may leave the
newest commit in part. A bit that flips in the middle looks the same, and every commit behind it would vanish without a
word. Where the log goes on behind the end of the commit that has the bad frame, it is told apart: frames are written in
order, and a durable journal waits for the disk at the end of each commit, so no crash leaves such a log.

Source: https://www.sqlite.org/fileformat2.html#the_write_ahead_log
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Final

_HEADER: Final = struct.Struct(">IIII8sII")
"""Magic number, format, bytes of a page, number of restarts, salts; checksums of these."""
_FRAME: Final = struct.Struct(">II8sII")
"""Page, pages of the database if a commit ends here (else 0), salts of its log; checksums of all up to its end."""
_SUMMED: Final = 24, 8
"""Bytes of a log's and of a frame's header that checksums cover."""
_ORDERS: Final = {0x377F0682: "<", 0x377F0683: ">"}


def lost_at(path: Path) -> int | None:
    """The first frame (from 1; 0 for the header) that is not what was written, if commits behind it are lost.

    Args:
        path: The log. Nobody may write it meanwhile.

    Returns:
        None if there is no log, or nothing of it is lost but perhaps the newest commit.
    """
    if not path.exists():
        return None
    with path.open("rb") as log:
        header = log.read(_HEADER.size)
        if len(header) < _HEADER.size:
            return None
        magic, _, page_bytes, _, salts, *written = _HEADER.unpack(header)
        order = _ORDERS.get(magic, "<")
        sums = _summed(header[: _SUMMED[0]], order, (0, 0))
        if magic not in _ORDERS or list(sums) != written:
            # It is on the disk before the first frame is written.
            return 0 if log.read(1) else None
        bad, has_ended, number = 0, False, 0
        while len(frame := log.read(_FRAME.size + page_bytes)) == _FRAME.size + page_bytes:
            number += 1
            page, pages, of_log, *written = _FRAME.unpack_from(frame)
            if not bad:
                sums = _summed(frame[_FRAME.size :], order, _summed(frame[: _SUMMED[1]], order, sums))
                if page and of_log == salts and list(sums) == written:
                    continue
                bad = number
            # Others are of the log before its last restart, and in the database.
            if of_log == salts:
                if has_ended:
                    return bad
                has_ended = pages > 0
    return None


def _summed(data: bytes, order: str, sums: tuple[int, int]) -> tuple[int, int]:
    """Checksums that go on over some more words."""
    first, second = sums
    for one, other in struct.iter_unpack(f"{order}II", data):
        first = (first + one + second) & 0xFFFFFFFF
        second = (second + other + first) & 0xFFFFFFFF
    return first, second
