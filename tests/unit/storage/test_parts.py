"""Parts of rows that a thread keeps in a folder."""

import errno
import os
import signal
import subprocess
import sys
import time

import pyarrow as pa
import pytest
from pyarrow import parquet

from cosmos_core.storage import parts
from cosmos_core.storage.parts import PartWriter, counts_of


def schema():
    return pa.schema({"number": pa.int64(), "text": pa.string()})


def rows(*numbers):
    return [{"number": number, "text": os.urandom(64).hex()} for number in numbers]


def read(folder):
    """Numbers of all rows, in the order of their parts, and the sum of all counts."""
    files = sorted(folder.glob("*.parquet"), key=lambda path: int(path.name.split(".")[-2]))
    numbers, counts = [], parts.Counter()
    for path in files:
        # Opened once: a part that is written is replaced by a longer one.
        with parquet.ParquetFile(path) as file:
            numbers += file.read()["number"].to_pylist()
            counts += counts_of(file.metadata)
    return numbers, counts


def until(condition, timeout_s=10.0):
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.fixture
def writer(tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "_PAUSE_S", 0.01)
    made = []

    def make(max_bytes=1 << 30, name="rollout-0"):
        made.append(PartWriter(tmp_path / "kept", "samples", name, schema, max_bytes))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_rows_are_soon_in_few_files_and_what_waits_is_written_at_the_end(writer, tmp_path, monkeypatch):
    one = writer()
    assert not (tmp_path / "kept").exists()
    for number in range(5):
        one.put(rows(number), 100)
        until(lambda: read(tmp_path / "kept")[0] == list(range(number + 1)))  # noqa: B023 - called at once
    assert len(list((tmp_path / "kept").iterdir())) == 1
    monkeypatch.setattr(parts, "_PART_ROWS", 6)
    one.put(rows(5, 6), 100)
    until(lambda: len(read(tmp_path / "kept")[0]) == 7)
    one.put(rows(7), 100)
    one.close()
    assert read(tmp_path / "kept") == (list(range(8)), {"rows": 8})
    assert len(list((tmp_path / "kept").iterdir())) == 2


def test_the_oldest_parts_go_where_all_are_too_large_and_are_counted(writer, tmp_path, caplog):
    most = 20_000
    one, other = writer(most), writer(most, "rollout-1")
    # The oldest one cannot be read.
    (tmp_path / "kept").mkdir()
    damaged = tmp_path / "kept/samples.rollout-2.1.parquet"
    damaged.write_bytes(b"PAR1" + b"?" * 3000 + (2000).to_bytes(4, "little") + b"PAR1")
    os.utime(damaged, (1, 1))
    for number in range(0, 1000, 20):
        for each in (one, other):
            each.put(rows(*range(number, number + 20)), 100)
        until(lambda: not one._rows and not other._rows)
    one.close()
    other.close()
    damaged.unlink()
    left, counts = read(tmp_path / "kept")
    assert 0 not in left
    assert 999 in left
    assert counts["rows"] == len(left)
    assert counts["rows"] + counts["removed"] == 2000
    assert sum(path.stat().st_size for path in (tmp_path / "kept").iterdir()) < 1.5 * most
    assert len([text for text in caplog.messages if "samples have reached their bound of 20000 bytes" in text]) == 2


def test_a_full_disk_is_told_once_and_costs_what_was_not_written(writer, tmp_path, monkeypatch, caplog):
    one, write, full, lost = writer(), parquet.write_table, [False], []
    one.tell = lambda *what: lost.append(what)

    def write_table(table, path, **how):
        write(table, path, **how)
        if full[0]:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(parquet, "write_table", write_table)
    one.put(rows(0), 100)
    until(lambda: read(tmp_path / "kept")[0] == [0])
    full[0] = True
    for number in (1, 2):
        one.put(rows(number), 100)
        until(lambda: one._lost["left_out"] == number)  # noqa: B023 - called at once
    full[0] = False
    one.put(rows(3), 100)
    one.close()
    assert read(tmp_path / "kept") == ([0, 3], {"rows": 2, "left_out": 2})
    (told,) = caplog.messages
    assert "samples in" in told
    assert "No space left on device" in told
    assert lost == [(1, "[Errno 28] No space left on device")] * 2
    assert all(path.suffix == ".parquet" for path in (tmp_path / "kept").iterdir())


def test_rows_that_come_too_fast_are_left_out_and_nobody_waits(writer, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(parts, "_PAUSE_S", 600.0)
    one, lost = writer(), []
    one.tell = lambda *what: lost.append(what)
    for number in range(100):
        one.put(rows(number), 10 << 20)
    one.close()
    assert lost == [(1, "they come faster than they are written")] * 94
    assert read(tmp_path / "kept") == (list(range(6)), {"rows": 6, "left_out": 94})
    one.put(rows(100), 100)
    assert lost.pop() == (1, "too late")
    (told,) = caplog.messages
    assert told.endswith("are not kept as they should be: they come faster than they are written")


def test_a_writer_that_is_killed_leaves_whole_parts_only(tmp_path):
    script = """
import itertools, pathlib, sys
import pyarrow as pa
from cosmos_core.storage import parts
parts._PAUSE_S = 0
schema = lambda: pa.schema({"number": pa.int64(), "text": pa.string()})
writer = parts.PartWriter(pathlib.Path(sys.argv[1]), "samples", "r", schema, 1 << 30)
for number in itertools.count():
    while len(writer._rows) > 100:
        pass
    writer.put([{"number": number, "text": str(number) * 200}], 1)
"""
    process = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)])
    until(lambda: list(tmp_path.glob("*.parquet")))
    time.sleep(0.3)
    process.send_signal(signal.SIGKILL)
    process.wait()
    numbers, _ = read(tmp_path)
    assert len(numbers) > 100
    assert numbers == list(range(len(numbers)))
