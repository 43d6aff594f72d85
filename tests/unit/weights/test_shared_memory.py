import errno
import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cosmos_core.errors import WeightSyncError
from cosmos_core.weights import shared_memory
from cosmos_core.weights.shared_memory import HEADER_BYTES, SharedFile, map_shared, sweep

LEAVE_A_FILE = """
import os, sys
from pathlib import Path
from cosmos_core.weights.shared_memory import SharedFile
file = SharedFile(label="v1", token="t", size=4096, directory=Path(sys.argv[1]))
print(file.path, flush=True)
if sys.argv[2] == "die":
    os._exit(1)
sys.stdin.read()
"""


def run_child(directory, what):
    return subprocess.Popen(
        [sys.executable, "-c", LEAVE_A_FILE, str(directory), what],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_a_file_is_read_by_its_token_and_outlives_its_name(tmp_path):
    file = SharedFile(label="v1", token="right", size=4096, directory=tmp_path)
    file.buffer[HEADER_BYTES:] = b"x" * (4096 - HEADER_BYTES)
    assert map_shared(str(file.path), token="wrong", size=4096) is None
    assert map_shared(str(file.path), token="right", size=5000) is None
    mapped = map_shared(str(file.path), token="right", size=4096)
    file.close()
    file.close()
    assert list(tmp_path.iterdir()) == []
    assert map_shared(str(file.path), token="right", size=4096) is None
    assert mapped[HEADER_BYTES:] == b"x" * (4096 - HEADER_BYTES)


def test_a_readers_writes_stay_its_own(tmp_path):
    file = SharedFile(label="v1", token="t", size=4096, directory=tmp_path)
    mapped = map_shared(str(file.path), token="t", size=4096)
    mapped[100:103] = b"abc"
    assert file.buffer[100:103] == b"\0\0\0"


MAP = """
import sys
from cosmos_core.weights.shared_memory import HEADER_BYTES, map_shared
mapped = map_shared(sys.argv[1], token="one", size=4096)
print(mapped is not None, flush=True)
sys.stdin.readline()
print(mapped[HEADER_BYTES:HEADER_BYTES + 3].decode(), flush=True)
"""


def test_a_file_is_renewed_only_when_no_process_maps_it(tmp_path):
    file = SharedFile(label="v1", token="one", size=4096, directory=tmp_path)
    file.buffer[HEADER_BYTES : HEADER_BYTES + 3] = b"old"
    old = str(file.path)
    reader = subprocess.Popen([sys.executable, "-c", MAP, old], stdin=-1, stdout=-1, text=True)
    assert reader.stdout.readline() == "True\n"
    assert not file.renew(label="v2", token="two", size=4096)
    assert reader.communicate("\n")[0] == "old\n"
    assert not file.renew(label="v2", token="two", size=5000)
    assert file.renew(label="v2", token="two", size=4096)
    assert map_shared(old, token="one", size=4096) is None
    assert map_shared(str(file.path), token="one", size=4096) is None
    assert map_shared(str(file.path), token="two", size=4096) is not None
    gc.collect()
    assert [path.name for path in tmp_path.iterdir()] == [f"cosmos-weights-{os.getpid()}-v2-two"]
    file.close()
    assert list(tmp_path.iterdir()) == []
    assert not file.renew(label="v3", token="three", size=4096)


def test_a_file_that_cannot_be_mapped_is_not_left_behind(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(shared_memory.mmap, "mmap", fail)
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(WeightSyncError, match=r"no room for a weight snapshot of 4,096 bytes .*Cannot allocate memory"):
        SharedFile(label="v1", token="one", size=4096, directory=tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert len(list(Path("/proc/self/fd").iterdir())) <= before


def test_a_file_that_is_being_written_over_is_not_mapped(tmp_path, caplog):
    file = SharedFile(label="v1", token="one", size=4096, directory=tmp_path)
    assert shared_memory._lock(file._fd, shared_memory._WRITER) == "held"
    assert map_shared(str(file.path), token="one", size=4096) is None
    assert not caplog.records


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP, errno.ENOLCK])
def test_files_that_cannot_be_locked_are_mapped_and_never_written_over_and_that_is_said_once(
    tmp_path, monkeypatch, caplog, code
):
    def fail(*_):
        raise OSError(code, os.strerror(code))

    shared_memory._tell_no_locks.cache_clear()
    monkeypatch.setattr(shared_memory.fcntl, "fcntl", fail)
    file = SharedFile(label="v1", token="one", size=4096, directory=tmp_path)
    assert map_shared(str(file.path), token="one", size=4096) is not None
    gc.collect()
    assert not file.renew(label="v2", token="two", size=4096)
    (said,) = [record.getMessage() for record in caplog.records]
    assert os.strerror(code) in said


def test_what_else_a_lock_fails_of_is_said_and_nothing_is_mapped(tmp_path, monkeypatch, caplog):
    def fail(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(shared_memory.fcntl, "fcntl", fail)
    file = SharedFile(label="v1", token="one", size=4096, directory=tmp_path)
    assert map_shared(str(file.path), token="one", size=4096) is None
    assert not file.renew(label="v2", token="two", size=4096)
    assert len(caplog.records) == 2


def test_a_forgotten_file_is_unlinked(tmp_path):
    file = SharedFile(label="v1", token="t", size=4096, directory=tmp_path)
    assert str(os.getpid()) in file.path.name
    assert file.path.stat().st_mode & 0o777 == 0o600
    del file
    gc.collect()
    assert list(tmp_path.iterdir()) == []


def test_only_what_the_dead_left_is_swept(tmp_path):
    own = SharedFile(label="v1", token="t", size=4096, directory=tmp_path)
    foreign = tmp_path / "something-else"
    foreign.touch()
    with run_child(tmp_path, "die") as dead, run_child(tmp_path, "live") as alive:
        left, held = (Path(child.stdout.readline().strip()) for child in (dead, alive))
        dead.wait()
        assert left.exists()
        assert sweep(tmp_path) == [left]
        assert {path.name for path in tmp_path.iterdir()} == {own.path.name, held.name, foreign.name}
        alive.communicate("")
    assert not held.exists()


def test_a_locked_file_is_never_swept_whatever_its_pid_says(tmp_path, monkeypatch):
    file = SharedFile(label="v1", token="t", size=4096, directory=tmp_path)
    monkeypatch.setattr(shared_memory, "_is_alive", lambda pid: False)
    assert sweep(tmp_path) == []
    assert file.path.exists()


def test_no_room_is_said_with_the_folder_and_leaves_nothing(tmp_path, monkeypatch):
    def full(fd, offset, size):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shared_memory.os, "posix_fallocate", full)
    with pytest.raises(WeightSyncError, match=r"no room for a weight snapshot of 4,096 bytes .*No space left"):
        SharedFile(label="v1", token="t", size=4096, directory=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_second_folder_is_used_when_the_first_is_full(tmp_path, monkeypatch):
    folders = (tmp_path / "missing", tmp_path)
    monkeypatch.setattr(shared_memory, "directories_for_files", lambda: folders)
    assert SharedFile(label="v1", token="t", size=4096).path.parent == tmp_path
