import fcntl
import os
import signal
import subprocess
import sys
import tempfile

from cosmos_core.scratch import remove_abandoned, scratch, shared_scratch

KILLED = """
import os, signal, sys
from cosmos_core.scratch import scratch
with scratch("of the killed") as folder:
    (folder / "inside").mkdir()
    if not (fork := os.fork()):
        sys.exit()
    os.waitpid(fork, 0)
    assert (folder / "inside").exists()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_process_left_is_removed_and_nothing_else(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", KILLED], env=environment, timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    (tmp_path / "cosmos-of-somebody").mkdir()
    with scratch("first") as first:
        assert not left.exists()
        (first / "file").touch()
        with scratch("second") as second:
            assert (first / "file").exists()
            assert second.parent == tmp_path
    assert [path.name for path in tmp_path.iterdir()] == ["cosmos-of-somebody"]


def test_a_folder_that_others_tidy_away_before_it_is_locked_is_made_again(tmp_path, monkeypatch):
    opened, real = [], os.open

    def open_late(path, *args, **options):
        if not opened:
            opened.append(path)
            assert remove_abandoned(path)
        return real(path, *args, **options)

    for enter, label in ((scratch, "new"), (shared_scratch, "shared")):
        opened.clear()
        monkeypatch.setattr(os, "open", open_late)
        with enter(label, str(tmp_path)) as folder:
            assert folder.is_dir()
            assert opened
            assert not remove_abandoned(folder)
        monkeypatch.undo()
    assert not [*tmp_path.iterdir()]


def test_a_folder_that_is_entered_while_one_of_its_name_is_tidied_away_stays(tmp_path, monkeypatch):
    abandoned, real, entered = tmp_path / "cosmos-scratch-shared", fcntl.flock, []
    abandoned.mkdir()

    def lock_late(*arguments):
        monkeypatch.undo()
        assert remove_abandoned(abandoned)
        entered.append(shared_scratch("shared", str(tmp_path)))
        entered[0].__enter__()
        return real(*arguments)

    monkeypatch.setattr(fcntl, "flock", lock_late)
    assert not remove_abandoned(abandoned)
    assert abandoned.is_dir()
    entered[0].__exit__(None, None, None)
    assert not abandoned.exists()
