"""Rows kept in the files of a folder, as Parquet, by a thread that nobody waits for; the oldest files make room.

A part is written again, whole, every few seconds while rows wait, until it is large enough: so files are few, and a
process that is killed loses what came since. Its metadata count rows that no part has. The thread imports pyarrow.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

FOLDER: Final = "samples"
"""In the folder of a run."""

_PAUSE_S: Final = 5.0
_WAITING_BYTES: Final = 64 << 20
_PART_BYTES: Final = 32 << 20
_PART_ROWS: Final = 8192
_CLOSE_S: Final = 3.0
"""Less than the processes of a run have to end after it."""
_COUNTS: Final = b"cosmos_core.counts"
_LOG: Final = logging.getLogger(__name__)


@contextlib.contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A path to write to, which is renamed to `path` once the block has ended well: the file is there whole, or not."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


class PartWriter:
    """Keeps rows in `FOLDER/KIND.NAME.UNIX-MS.parquet`.

    Args:
        folder: Made when it is first needed; others may write there at the same time.
        kind: One word, of which rows these are.
        name: Of the process.
        schema: Makes the `pyarrow.Schema` of the rows.
        max_bytes: Of the folder's files of this kind, without the one that is being written.

    Attributes:
        tell: Called on any thread with the number of rows that could not be written, and why.
    """

    def __init__(self, folder: Path, kind: str, name: str, schema: Callable[[], Any], max_bytes: int) -> None:
        self._folder, self._kind, self.name = folder, kind, name
        self._schema, self._max_bytes = schema, max_bytes
        self.tell: Callable[[int, str], object] = lambda *_: None
        self._lock: Final = threading.Lock()
        self._closed: Final = threading.Event()
        self._thread: Final = threading.Thread(target=self._run, name=f"parts of {kind}", daemon=True)
        self._rows: list[Mapping[str, Any]] = []
        self._rows_bytes = self._num_in_hand = 0
        # Rows that were left out or removed, and are in no part's counts yet.
        self._lost = Counter[str]()
        self._told: set[str] = set()
        self._begin()

    def put(self, rows: Sequence[Mapping[str, Any]], num_bytes: int) -> None:
        """Take in rows, of about so many bytes in memory; where too many wait they are left out, and counted."""
        with self._lock:
            is_full = bool(self._rows) and self._rows_bytes + num_bytes > _WAITING_BYTES
            if not is_full and not self._closed.is_set():
                self._rows += rows
                self._rows_bytes += num_bytes
                if self._thread.ident is None:
                    self._thread.start()
                return
        self.leave_out(len(rows), TimeoutError("they come faster than they are written" if is_full else "too late"))

    def leave_out(self, number: int, error: Exception) -> None:
        """Count rows that could not be made, or written."""
        with self._lock:
            self._lost["left_out"] += number
        self._warn("%s in %s are not kept as they should be: %s", self._kind, self._folder, error)
        if number:
            self.tell(number, str(error))

    def close(self) -> None:
        """Write what waits."""
        self._closed.set()
        if self._thread.ident is not None:
            self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            self.leave_out(self._num_in_hand, TimeoutError(f"not written within {_CLOSE_S:g} s of the end"))

    def _warn(self, message: str, *arguments: Any) -> None:
        if message not in self._told:
            self._told.add(message)
            _LOG.warning(message, *arguments)

    def _begin(self) -> None:
        self._path = self._folder / f"{self._kind}.{self.name}.{time.time_ns() // 1_000_000}.parquet"
        self._table: Any = None
        self._counts = Counter[str]()

    def _run(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._closed.wait(_PAUSE_S)
            self._flush()

    def _flush(self) -> None:
        with self._lock:
            rows, self._rows, self._rows_bytes = self._rows, [], 0
            lost, self._lost = self._lost, Counter()
            self._num_in_hand = len(rows)
        if not rows and not lost:
            return
        try:
            self._write(rows, self._counts + lost)
            rows, lost = [], Counter()
            lost = self._make_room()
        except Exception as error:  # noqa: BLE001 - a full disk, a value that a column does not take: the run goes on
            self.leave_out(len(rows), error)
        with self._lock:
            self._lost += lost

    def _write(self, rows: Sequence[Mapping[str, Any]], counts: Counter[str]) -> None:
        import pyarrow as pa  # noqa: PLC0415 - where it is needed
        from pyarrow import parquet  # noqa: PLC0415

        from cosmos_core.storage.columns import column  # noqa: PLC0415

        schema = self._schema().with_metadata({_COUNTS: json.dumps(counts)})
        table = pa.table([column(each.type, [row.get(each.name) for row in rows]) for each in schema], schema=schema)
        if self._table is not None:
            table = pa.concat_tables([self._table.replace_schema_metadata(table.schema.metadata), table])
        self._folder.mkdir(parents=True, exist_ok=True)
        if self._table is None:
            # Of a process of this name that was killed while it wrote.
            for left in self._folder.glob(f".{self._kind}.{self.name}.*.partial"):
                left.unlink(missing_ok=True)
        with whole(self._path) as partial:
            parquet.write_table(table, partial, compression="zstd")
        self._table, self._counts = table, counts
        if table.nbytes > min(_PART_BYTES, self._max_bytes // 8) or len(table) > _PART_ROWS:
            self._begin()

    def _make_room(self) -> Counter[str]:
        """Remove the oldest parts while all are too large; counts of the rows that are lost with them."""
        from pyarrow import parquet  # noqa: PLC0415 - where it is needed

        found, lost = [], Counter[str]()
        # Another writer may be faster: what it removes, it counts. What is damaged stays, for the reader to tell.
        for path in paths(self._folder, self._kind):
            with contextlib.suppress(FileNotFoundError):
                found.append((path.stat().st_mtime, path.stat().st_size, path))
        excess = sum(size for _, size, _ in found) - self._max_bytes
        for _, size, path in sorted(found):
            if excess > 0 and path != self._path:
                # pyarrow has an OSError or a ValueError of its own for each kind of damage.
                with contextlib.suppress(OSError, ValueError):
                    counts = counts_of(parquet.read_metadata(path))
                    path.unlink()
                    lost += counts + Counter(removed=counts.pop("rows"))
                    self._warn("%s have reached their bound of %d bytes: the oldest go", self._kind, self._max_bytes)
                excess -= 0 if path.exists() else size
        return lost


def paths(folder: Path, kind: str) -> list[Path]:
    """The parts of a kind in the order in which they were begun; files of any other name are no parts."""
    name = re.compile(rf"{kind}\..+\.([0-9]+)\.parquet")
    found = [(int(part[1]), path) for path in folder.glob(f"{kind}.*") if (part := name.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def counts_of(metadata: Any) -> Counter[str]:
    """The `rows` of a part by its `FileMetaData`, and those that were `removed` or `left_out` while it was written."""
    return Counter({**json.loads((metadata.metadata or {}).get(_COUNTS, b"{}")), "rows": metadata.num_rows})
