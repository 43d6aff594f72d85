"""SQLite's log of a journal whose controller was killed: what became of it after, and what is told of that."""

from __future__ import annotations

import shutil
import struct

import pytest

from cosmos_core.control.journal import Journal, entries, lost_at
from cosmos_core.control.machine.events import ControllerStarted
from cosmos_core.errors import DamagedJournalError

HEADER, FRAME = 32, 24 + 4096


def commit(journal, number=1):
    for _ in range(number):
        journal.append(ControllerStarted(term=journal.last))
    journal.commit()


def left_by(journal, folder):
    """The files as a kill of the controller would leave them now; the log, and the journal."""
    folder.mkdir()
    for path in journal._path.parent.glob("journal.sqlite*"):
        shutil.copy(path, folder)
    return folder / "journal.sqlite-wal", folder / "journal.sqlite"


@pytest.fixture
def journal(tmp_path):
    with Journal(tmp_path / "journal.sqlite") as journal:
        journal.settle()
        yield journal


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """A folder with five commits in the log, the last in four frames, the others in one."""
    folder = tmp_path_factory.mktemp("killed")
    with Journal(folder / "journal.sqlite") as journal:
        journal.settle()
        for _ in range(4):
            commit(journal)
        commit(journal, 100)
        log, _ = left_by(journal, folder / "left")
    assert pages_of(log) == [2, 2, 2, 2, 0, 0, 0, 4]
    return log.parent


@pytest.fixture
def left(killed, tmp_path):
    """The log and the journal in a copy of it."""
    shutil.copytree(killed, tmp_path / "left")
    return tmp_path / "left" / "journal.sqlite-wal", tmp_path / "left" / "journal.sqlite"


def copied(left, name):
    """The same, in another folder beside it."""
    log, path = left
    folder = shutil.copytree(log.parent, log.parent.parent / name)
    return folder / log.name, folder / path.name


def pages_of(log):
    content = log.read_bytes()
    return [struct.unpack_from(">I", content, at + 4)[0] for at in range(HEADER, len(content), FRAME)]


def flip(log, at):
    content = bytearray(log.read_bytes())
    content[at] ^= 0x10
    log.write_bytes(content)


def num_entries(path):
    """Entries as they are read, and as a controller that goes on finds them."""
    number = sum(1 for _ in entries(path))
    with Journal(path) as journal:
        assert journal.last == number
    return number


def test_a_log_that_was_left_is_whole(left):
    log, path = left
    assert lost_at(log) is None
    assert num_entries(path) == 104
    assert lost_at(log) is None  # there is none any more


def test_a_flipped_bit_does_not_hide_what_was_committed_after_it(left):
    log, path = left
    whole = log.read_bytes()
    for frame in (1, 2, 3):
        told = f"frame {frame} is not"
        for at in (0, 4, 8, 16, 16 + 7, 24, 24 + 4095):
            flip(log, HEADER + (frame - 1) * FRAME + at)
            spoilt = log.read_bytes()
            for _ in range(2):
                with pytest.raises(DamagedJournalError, match=rf"-wal: {told} .*; cosmos recover {path.parent}"):
                    list(entries(path))
                with pytest.raises(DamagedJournalError, match=told):
                    Journal(path)
            assert log.read_bytes() == spoilt != whole
            log.write_bytes(whole)


def test_a_flipped_bit_in_the_header_does_not_hide_the_log(left):
    log, path = left
    whole = log.read_bytes()
    for at in (0, 8, 12, 16, 24, 31):
        flip(log, at)
        for use in (Journal, lambda path: list(entries(path))):
            with pytest.raises(DamagedJournalError, match="its header is not"):
                use(path)
        log.write_bytes(whole)


def test_a_log_that_ends_early_ends_with_its_last_whole_commit(left, subtests):
    for size, number in (
        (0, 0),
        (20, 0),
        (HEADER, 0),
        (HEADER + 10, 0),
        (HEADER + FRAME, 1),
        (HEADER + 4 * FRAME - 1, 3),
        (HEADER + 5 * FRAME, 4),
        (HEADER + 7 * FRAME + 100, 4),
    ):
        with subtests.test(size=size):
            log, path = copied(left, f"{size}")
            log.write_bytes(log.read_bytes()[:size])
            assert num_entries(path) == number


def test_the_newest_commit_may_be_there_in_part_in_any_order(left, subtests):
    for frames in ({5}, {6}, {8}, {5, 7}, {7, 8}, {5, 6, 7, 8}):
        with subtests.test(frames=frames):
            log, path = copied(left, "-".join(map(str, frames)))
            content = bytearray(log.read_bytes())
            for frame in frames:
                start = HEADER + (frame - 1) * FRAME
                content[start : start + FRAME] = bytes(FRAME)
            log.write_bytes(content)
            assert num_entries(path) == 4


def test_what_is_left_of_the_log_before_a_restart_is_not_lost(journal, tmp_path):
    for _ in range(6):
        commit(journal)
    journal._connection.execute("PRAGMA wal_checkpoint(RESTART)")
    commit(journal, 2)
    log, path = left_by(journal, tmp_path / "left")
    assert len(pages_of(log)) == 6
    assert num_entries(path) == 8
    # The newest commit alone: one that is torn leaves the same.
    log, path = left_by(journal, tmp_path / "torn")
    flip(log, HEADER + 100)
    assert num_entries(path) == 6


def test_what_was_rolled_back_is_not_lost(journal, tmp_path):
    execute = journal._connection.execute
    execute("PRAGMA cache_size = 10")
    execute("BEGIN")
    for number in range(1000, 1200):
        execute("INSERT INTO events VALUES (?, 0, zeroblob(1000), 0)", (number,))
    execute("ROLLBACK")
    commit(journal)
    log, path = left_by(journal, tmp_path / "left")
    pages = pages_of(log)
    assert len(pages) > 10
    assert pages[0]
    assert not any(pages[1:])
    assert num_entries(path) == 1
