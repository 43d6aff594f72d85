import os
import signal
import subprocess
import sys
import tempfile

from cosmos_core.scratch import scratch

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
