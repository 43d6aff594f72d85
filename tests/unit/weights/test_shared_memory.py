import errno
import gc
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

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
    mapped[100:103] = b"abc"
    assert file.buffer[100:103] == b"xxx"


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


def test_no_room_is_said_with_the_folder_and_leaves_nothing(tmp_path, monkeypatch):
    before = len(list(Path("/proc/self/fd").iterdir()))
    for where, name, code in (
        (shared_memory.mmap, "mmap", errno.ENOMEM),
        (shared_memory.os, "posix_fallocate", errno.ENOSPC),
    ):
        monkeypatch.setattr(where, name, mock.Mock(side_effect=OSError(code, os.strerror(code))))
        said = rf"no room for a weight snapshot of 4,096 bytes \({tmp_path}: {os.strerror(code)}\)"
        with pytest.raises(WeightSyncError, match=said):
            SharedFile(label="v1", token="one", size=4096, directory=tmp_path)
        assert list(tmp_path.iterdir()) == []
        assert len(list(Path("/proc/self/fd").iterdir())) <= before


def test_a_file_that_is_being_written_over_is_not_mapped(tmp_path, caplog):
    file = SharedFile(label="v1", token="one", size=4096, directory=tmp_path)
    assert shared_memory._lock(file._fd, shared_memory._WRITER) == "held"
    assert map_shared(str(file.path), token="one", size=4096) is None
    assert not caplog.records


def test_files_that_cannot_be_locked_are_never_written_over_and_that_is_said_once(
    tmp_path, monkeypatch, caplog, subtests
):
    for code, number_said in ((errno.EINVAL, 1), (errno.ENOTSUP, 1), (errno.ENOLCK, 1), (errno.EIO, 2)):
        with subtests.test(code=os.strerror(code)):
            caplog.clear()
            shared_memory._tell_no_locks.cache_clear()
            failure = OSError(code, os.strerror(code))
            monkeypatch.setattr(shared_memory.fcntl, "fcntl", mock.Mock(side_effect=failure))
            file = SharedFile(label=f"v{code}", token="one", size=4096, directory=tmp_path)
            # Files without locks may be mapped; of any other failure nobody knows what it means.
            assert (map_shared(str(file.path), token="one", size=4096) is None) == (code == errno.EIO)
            gc.collect()
            assert not file.renew(label="v2", token="two", size=4096)
            said = [record.getMessage() for record in caplog.records]
            assert len(said) == number_said
            assert os.strerror(code) in said[0]


def test_a_forgotten_file_is_unlinked(tmp_path):
    file = SharedFile(label="v1", token="t", size=4096, directory=tmp_path)
    assert str(os.getpid()) in file.path.name
    assert file.path.stat().st_mode & 0o777 == 0o600
    del file
    gc.collect()
    assert list(tmp_path.iterdir()) == []


def test_only_what_the_dead_left_is_swept(tmp_path, monkeypatch):
    own = SharedFile(label="v1", token="t", size=4096, directory=tmp_path)
    foreign = tmp_path / "something-else"
    foreign.touch()
    with run_child(tmp_path, "die") as dead, run_child(tmp_path, "live") as alive:
        left, held = (Path(child.stdout.readline().strip()) for child in (dead, alive))
        dead.wait()
        assert left.exists()
        assert sweep(tmp_path) == [left]
        with monkeypatch.context() as patch:
            patch.setattr(shared_memory.psutil, "pid_exists", lambda pid: False)
            assert sweep(tmp_path) == []  # files are locked, whatever their process ids say
        assert {path.name for path in tmp_path.iterdir()} == {own.path.name, held.name, foreign.name}
        alive.communicate("")
    assert not held.exists()


def test_the_second_folder_is_used_when_the_first_is_full(tmp_path, monkeypatch):
    folders = (tmp_path / "missing", tmp_path)
    monkeypatch.setattr(shared_memory, "directories_for_files", lambda: folders)
    assert SharedFile(label="v1", token="t", size=4096).path.parent == tmp_path
