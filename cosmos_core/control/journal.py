"""The journal: every event of a run in a SQLite file, written by one controller at a time.

Events are appended in memory and made durable together by `commit`; nothing that follows from an event may leave
the process before that. In WAL mode a commit survives a crash of the process, with `durable` also a power cut.
The newest commits may go missing unnoticed: at a power cut without `durable` all since the log was last synchronised,
where the log is damaged the last one (`lost_at` finds the rest). What was settled may not.
Each entry has a checksum of itself and all before it: SQLite has none, and a flipped bit may still decode.
"""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
import struct
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from cosmos_core.control.machine import core
from cosmos_core.control.machine.events import EVENTS, Event
from cosmos_core.control.machine.state import State
from cosmos_core.errors import DamagedJournalError, JournalError, TransportError
from cosmos_core.transport.sockets import Closing

_PLACE: Final = struct.Struct("<qd")
_ROOM: Final = 1 << 20
_APPLICATION_ID: Final = 0x636F736D  # "cosm"
_VERSION: Final = 3
_SCHEMA: Final = (
    "CREATE TABLE events (sequence INTEGER PRIMARY KEY, time REAL NOT NULL, event BLOB NOT NULL, sum INTEGER NOT NULL)"
)

_HEADER: Final = struct.Struct(">IIII8sII")
"""Magic number, format, bytes of a page, number of restarts, salts; checksums of these."""
_FRAME: Final = struct.Struct(">II8sII")
"""Page, pages of the database if a commit ends here (else 0), salts of its log; checksums of all up to its end."""
_SUMMED: Final = 24, 8
"""Bytes of a log's and of a frame's header that checksums cover."""
_ORDERS: Final = {0x377F0682: "<", 0x377F0683: ">"}

RECOVER: Final = "cosmos recover {} keeps it aside and goes on from the newest checkpoint"
"""What to do with a journal that is damaged, in the folder of a run."""


class Journal(Closing):
    """An open journal, made if absent. Not thread-safe.

    A commit of a `durable` one survives a power cut (slower), not only a crash. A file that is locked, unwritable,
    damaged or no journal is a JournalError.
    """

    def __init__(self, path: Path, *, durable: bool = False) -> None:
        self._path: Final = path
        self._pending: Final[list[tuple[int, float, bytes, int]]] = []
        self._sum: int
        with _explained(path):
            if path.exists() and _log_of(path).exists():
                # Not later: whoever has opened it to write makes what is left of the log the whole of it.
                with _reading(path):
                    pass
            self._connection = sqlite3.connect(path, isolation_level=None, timeout=0.0)
            try:
                self._prepare(durable=durable)
                newest = self._connection.execute("SELECT sequence, sum FROM events ORDER BY sequence DESC LIMIT 1")
                last, self._sum = newest.fetchone() or (0, 0)
            except BaseException:
                self._connection.close()
                raise
        self.last: int = last

    def append(self, event: Event) -> int:
        """Add an event to what the next `commit` makes durable, and return its sequence number (from 1)."""
        self.last += 1
        when, data = time.time(), EVENTS.encode(event)
        self._sum = _chained(self._sum, self.last, when, data)
        self._pending.append((self.last, when, data, self._sum))
        return self.last

    def commit(self) -> int:
        """Make everything appended durable, in one transaction; how many events that were."""
        if not self._pending:
            return 0
        with _explained(self._path):
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                self._connection.executemany("INSERT INTO events VALUES (?, ?, ?, ?)", self._pending)
                self._connection.execute("COMMIT")
            except sqlite3.Error:
                with contextlib.suppress(sqlite3.Error):
                    self._connection.execute("ROLLBACK")
                raise
        number = len(self._pending)
        self._pending.clear()
        return number

    def settle(self) -> None:
        """Commit, so that neither a power cut nor damage of SQLite's log takes back what was committed so far.

        It is in the file itself then, synchronised, whose damage is found by the checksums.
        """
        self.commit()
        with _explained(self._path):
            is_busy, _, _ = self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        assert not is_busy, "nobody else has it open"

    def read(self, after: int, limit: int) -> list[tuple[int, float, bytes]]:
        """Committed entries (sequence, unix time, encoded event) after a sequence number, in order."""
        with _explained(self._path):
            return self._connection.execute(
                "SELECT sequence, time, event FROM events WHERE sequence > ? ORDER BY sequence LIMIT ?", (after, limit)
            ).fetchall()

    def timed(self) -> Iterator[tuple[float, Event]]:
        """Every committed event with its unix time, in order."""
        for _, when, event in _read(self._connection, self._path):
            yield when, event

    def close(self) -> None:
        """Close the file; what was not committed is lost."""
        self._connection.close()

    def _prepare(self, *, durable: bool) -> None:
        execute = self._connection.execute
        execute("PRAGMA locking_mode = EXCLUSIVE")
        # The lock is taken by the first write transaction and kept from then on.
        execute("BEGIN EXCLUSIVE")
        execute("COMMIT")
        execute("PRAGMA journal_mode = WAL")
        execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
        if _is_unmade(self._connection):
            execute("BEGIN")
            execute(f"PRAGMA application_id = {_APPLICATION_ID}")
            execute(f"PRAGMA user_version = {_VERSION}")
            execute(_SCHEMA)
            execute("COMMIT")
        _require_journal(self._connection, self._path)


def entries(path: Path) -> Iterator[tuple[int, float, Event]]:
    """Read a journal that no controller has open: (sequence, unix time, event), in order."""
    if not path.exists():
        raise JournalError(f"{path}: there is no journal; is this the folder of a run?")
    with _reading(path) as file:
        if not _is_unmade(file):
            _require_journal(file, path)
            yield from _read(file, path)


def replay(path: Path) -> State:
    """The state that a journal leads to; no controller may have it open."""
    return core.fold(event for _, _, event in entries(path))


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[sqlite3.Connection]:
    """A file that is open to read, of which no commit is lost; nobody can write it meanwhile."""
    with _explained(path), contextlib.closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as file:
        file.execute("PRAGMA busy_timeout = 0")
        # The lock is taken by what is read first, and kept while there is a log.
        file.execute("PRAGMA application_id").fetchone()
        try:
            lost = lost_at(_log_of(path))
        except OSError as error:
            raise JournalError(f"{_log_of(path)}: {error.strerror}; {_remedy('SQLITE_IOERR', path.parent)}") from error
        if lost is not None:
            raise DamagedJournalError(
                f"{_log_of(path)}: {f'frame {lost}' if lost else 'its header'} is not what was written, and what was "
                "committed after it is lost (a bad disk, or a power cut with control.durable = false); "
                f"{RECOVER.format(path.parent)}"
            )
        yield file


def _log_of(path: Path) -> Path:
    return path.with_name(f"{path.name}-wal")


def _read(connection: sqlite3.Connection, path: Path) -> Iterator[tuple[int, float, Event]]:
    with _explained(path):
        rows = connection.execute("SELECT sequence, time, event, sum FROM events ORDER BY sequence")
        before = 0
        for expected, (sequence, when, data, written) in enumerate(rows, start=1):
            if sequence != expected:
                raise DamagedJournalError(f"{path}: entry {expected} is missing; {RECOVER.format(path.parent)}")
            before = _chained(before, sequence, when, data)
            if before != written:
                raise DamagedJournalError(
                    f"{path}: entry {sequence} is not what was written; {RECOVER.format(path.parent)}"
                )
            try:
                yield sequence, when, EVENTS.decode(data)
            except TransportError as error:
                raise DamagedJournalError(
                    f"{path}: entry {sequence} cannot be read ({error}): it was written by another release of "
                    f"cosmos-core, or is damaged; in that case {RECOVER.format(path.parent)}"
                ) from error


def _chained(before: int, sequence: int, when: float, data: bytes) -> int:
    """The checksum of an entry and of all before it."""
    return zlib.crc32(data, zlib.crc32(_PLACE.pack(sequence, when), before))


def _is_unmade(connection: sqlite3.Connection) -> bool:
    """True if nothing is in a file yet; a disk may have been full when it was to become a journal."""
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    return application in (0, _APPLICATION_ID) and tables == 0


def _require_journal(connection: sqlite3.Connection, path: Path) -> None:
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if application != _APPLICATION_ID:
        raise JournalError(f"{path}: this is no journal of cosmos-core; move it away, or choose another run.name")
    if version != _VERSION:
        raise JournalError(f"{path}: the journal has format {version}, this release reads {_VERSION}; use its release")


def _is_full(folder: Path) -> bool:
    try:
        return shutil.disk_usage(folder).free < _ROOM
    except OSError:
        return False


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Turn SQLite's errors into ours."""
    try:
        yield
    except sqlite3.Error as error:
        name = getattr(error, "sqlite_errorname", "")
        if name.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB")):
            recovery = RECOVER.format(path.parent)
            raise DamagedJournalError(f"{path}: is damaged, or no journal ({error}); {recovery}") from error
        raise JournalError(f"{path}: {error}; {_remedy(name, path.parent)}") from error


def _remedy(name: str, folder: Path) -> str:
    if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
        return (
            "another controller has it open: if the run goes on, ask again in a moment, as it may be starting; "
            "to start another one, stop that run first, or choose another run.name"
        )
    # A full disk shows as whatever it was full for: a page, or the index of the log, which is mapped.
    if name.startswith("SQLITE_FULL") or (name.startswith("SQLITE_IOERR") and _is_full(folder)):
        return "free some space on this disk, then go on with --resume"
    if name.startswith(("SQLITE_CANTOPEN", "SQLITE_READONLY", "SQLITE_IOERR", "SQLITE_PERM")):
        return "make sure that the run's folder exists and is writable, and that its disk works"
    return "the journal cannot be used"


def lost_at(path: Path) -> int | None:
    """The first frame (from 1; 0 for the header) of SQLite's log that is not what was written, if commits are lost.

    SQLite reads the log up to the first frame without its checksum and takes that for the end, since a crash may leave
    the newest commit in part. A bit that flips in the middle looks the same, and every commit behind it would vanish
    without a word. Where the log goes on behind the end of the commit that has the bad frame, it is told apart: frames
    are written in order, and a durable journal waits for the disk at the end of each commit, so no crash leaves such a
    log. None if there is no log, or nothing of it is lost but perhaps the newest commit. Nobody may write it meanwhile.

    Source: https://www.sqlite.org/fileformat2.html#the_write_ahead_log
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
