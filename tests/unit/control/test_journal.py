from __future__ import annotations

import contextlib
import os
import resource
import signal
import sqlite3
import subprocess
import sys
import textwrap

import pytest

from cosmos_core.control.journal import Journal, entries, replay
from cosmos_core.control.machine.events import EVENTS, ControllerStarted, RunOpened
from cosmos_core.errors import DamagedJournalError, JournalError


def fill(path, run, *, number=3):
    it = run()
    with Journal(path) as journal:
        journal.append(it.events[0])
        for term in range(1, number + 1):
            journal.append(ControllerStarted(term=term))
        journal.commit()


def test_what_was_committed_is_read_back_with_its_time_and_nothing_else(tmp_path, run):
    path = tmp_path / "journal.sqlite"
    fill(path, run)
    found = list(entries(path))
    assert [sequence for sequence, _, _ in found] == [1, 2, 3, 4]
    assert isinstance(found[0][2], RunOpened)
    assert found[3][2] == ControllerStarted(term=3)
    times = [when for _, when, _ in found]
    assert times == sorted(times)
    assert replay(path).term == 3
    with Journal(path) as journal:
        assert journal.last == 4
        assert [sequence for sequence, _, _ in journal.read(2, 10)] == [3, 4]
        assert len(journal.read(0, 2)) == 2
        assert list(journal.timed()) == [(when, event) for _, when, event in found]

    path = tmp_path / "other1.sqlite"
    fill(path, run)
    with Journal(path) as journal:
        assert journal.append(ControllerStarted(term=9)) == 5
        assert journal.read(0, 10)[-1][0] == 4
    assert replay(path).term == 3

    with Journal(tmp_path / "other2.sqlite") as journal:
        assert journal.commit() == 0

    path = tmp_path / "other3.sqlite"
    fill(path, run)
    for term in (4, 5):
        with Journal(path) as journal:
            journal.append(ControllerStarted(term=term))
            journal.commit()
    assert replay(path).term == 5


def test_what_was_settled_is_there_when_a_power_cut_takes_the_log(tmp_path, run, subtests):
    for is_settled in [True, False]:
        with subtests.test(is_settled=is_settled):
            path = tmp_path / f"{is_settled}.sqlite"
            fill(path, run)
            with Journal(path) as journal:
                journal.append(ControllerStarted(term=4))
                (journal.settle if is_settled else journal.commit)()
                journal.append(ControllerStarted(term=5))
                journal.commit()
                copy = tmp_path / "copy.sqlite"
                copy.write_bytes(path.read_bytes())
            assert replay(copy).term == (4 if is_settled else 3)


def test_one_writer_at_a_time(tmp_path, run):
    path = tmp_path / "journal.sqlite"
    with Journal(path):
        with pytest.raises(JournalError, match="another controller has it open"):
            Journal(path)
        with pytest.raises(JournalError, match="another controller has it open"):
            replay(path)
    Journal(path).close()


def test_a_journal_that_is_missing_empty_or_of_another_format_is_told(tmp_path, run):
    with pytest.raises(JournalError, match="there is no journal"):
        replay(tmp_path / "journal.sqlite")
    Journal(tmp_path / "journal.sqlite").close()
    with pytest.raises(JournalError, match="has not been opened"):
        replay(tmp_path / "journal.sqlite")

    with pytest.raises(JournalError, match="exists and is writable"):
        Journal(tmp_path / "nowhere" / "journal.sqlite")

    path = tmp_path / "other2.sqlite"
    fill(path, run)
    with sqlite3.connect(path) as file:
        file.execute("PRAGMA user_version = 99")
    file.close()
    with pytest.raises(JournalError, match="format 99"):
        replay(path)


@pytest.mark.parametrize("content", [b"no database at all " * 100, None])
def test_another_file_is_left_alone(tmp_path, content):
    path = tmp_path / "journal.sqlite"
    if content is None:
        with sqlite3.connect(path) as other:
            other.execute("CREATE TABLE mine (x)")
        other.close()
        content = path.read_bytes()
    else:
        path.write_bytes(content)
    for use in (Journal, replay):
        with pytest.raises(JournalError, match=r"damaged|no journal of cosmos-core"):
            use(path)
    if content.startswith(b"no database"):
        assert path.read_bytes() == content
    else:
        with sqlite3.connect(path) as other:
            assert other.execute("SELECT name FROM sqlite_master").fetchall() == [("mine",)]
        other.close()


def test_a_damaged_entry_and_one_of_another_release_are_named(tmp_path, run, subtests, monkeypatch):
    for change, complaint in [
        ("DELETE FROM events WHERE sequence = 2", "entry 2 is missing"),
        ("UPDATE events SET event = x'00' WHERE sequence = 2", "entry 2 is not what was written"),
        ("UPDATE events SET time = time + 1 WHERE sequence = 3", "entry 3 is not what was written"),
        # Both would decode, and be another history.
        (
            "UPDATE events SET event = (SELECT event FROM events WHERE sequence = 4) WHERE sequence = 3",
            "entry 3 is not",
        ),
    ]:
        with subtests.test(change=change):
            path = tmp_path / f"{len(complaint)}-{len(change)}.sqlite"
            fill(path, run)
            with sqlite3.connect(path) as file:
                file.execute(change)
            file.close()
            with pytest.raises(DamagedJournalError, match=f"{complaint}.*cosmos recover {tmp_path}"):
                replay(path)

    path = tmp_path / "other1.sqlite"
    fill(path, run)
    monkeypatch.delitem(EVENTS._decoders, "ControllerStarted")
    with pytest.raises(DamagedJournalError, match=r"entry 2 cannot be read .* by another release of cosmos-core"):
        replay(path)


def test_a_journal_that_a_full_disk_left_half_made_is_made_once_there_is_room(tmp_path, run, subtests):
    for limit_bytes in [0, 4096, 8192, 9000]:
        with subtests.test(limit_bytes=limit_bytes):
            path = tmp_path / f"{limit_bytes}.sqlite"
            soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))
            try:
                with contextlib.suppress(JournalError):
                    Journal(path).close()
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            assert list(entries(path)) == []
            fill(path, run)
            assert replay(path).term == 3


def test_a_file_that_says_what_it_is_and_has_nothing_else_is_made_a_journal(tmp_path, run):
    path = tmp_path / "journal.sqlite"
    with sqlite3.connect(path) as file:
        file.execute(f"PRAGMA application_id = {0x636F736D}")
    file.close()
    assert list(entries(path)) == []
    fill(path, run)
    assert replay(path).term == 3


def test_a_full_disk_loses_nothing_that_was_committed(tmp_path, run):
    path = tmp_path / "journal.sqlite"
    fill(path, run)
    with Journal(path) as journal:
        pages = journal._connection.execute("PRAGMA page_count").fetchone()[0]
        journal._connection.execute(f"PRAGMA max_page_count = {pages}")
        for term in range(10_000):
            journal.append(ControllerStarted(term=term))
        with pytest.raises(JournalError, match="free some space"):
            journal.commit()
    assert replay(path).term == 3


WRITER = """
    import os, sys
    from pathlib import Path
    from cosmos_core.control.machine.events import EVENTS, ControllerStarted
    from cosmos_core.control.journal import Journal

    journal = Journal(Path(sys.argv[1]))
    journal.append(EVENTS.decode(bytes.fromhex(sys.argv[2])))
    for term in range(1, 1_000_000):
        journal.append(ControllerStarted(term=term))
        if term % 7 == 0:
            journal.commit()
            os.write(1, b"%d\\n" % term)
"""


def test_a_killed_writer_loses_nothing_that_it_acted_upon(tmp_path, run):
    path = tmp_path / "journal.sqlite"
    command = [sys.executable, "-c", textwrap.dedent(WRITER), str(path), EVENTS.encode(run().events[0]).hex()]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as writer:
        for _ in range(50):
            writer.stdout.readline()
        os.kill(writer.pid, signal.SIGKILL)
        *_, last = writer.stdout.read().split(b"\n")[:-1] or [b"350"]
    state = replay(path)
    assert state.term >= int(last)
    assert state.term % 7 == 0
    with Journal(path) as journal:
        assert journal.last == state.term + 1
