"""The server itself; what is forked from it is in `launch/test_forks.py`."""

import subprocess
import sys

from tests.commandline import CommandLine
from tests.runs import RECIPE

REPLACED = """
import time
import psutil
from cosmos_core.run import fork_server
fork_server.PRELOADED = ("json",)
fork_server.prepare(1)
first = psutil.Process(fork_server.place()[1])
fork_server.prepare(1)
assert fork_server.place()[1] == first.pid
fork_server.prepare(2)
second = psutil.Process(fork_server.place()[1])
assert not first.is_running()
# Until it is the interpreter it is a copy of this process.
while (threads := second.environ().get("OMP_NUM_THREADS")) is None:
    time.sleep(0.01)
assert threads == "2"
fork_server.end()
assert fork_server.place() is None
assert not second.is_running()
fork_server.end()
"""

HINDERED = """
from cosmos_core.cli import main
from cosmos_core.run import fork_server
def hindered(*_):
    raise OSError("no folder left")
fork_server.scratch = hindered
main.main()
"""

TRACED = """
import sys
from cosmos_core.cli import main
from cosmos_core.run import fork_server
def prepare(threads):
    print(threads, *({"typer", "attrs", "zmq", "cosmos_core.protocols"} & set(sys.modules)))
fork_server.prepare = prepare
main.main()
"""

INTERRUPTED = """
import os, signal
from multiprocessing import forkserver
from pathlib import Path
from cosmos_core.run import fork_server
begin = forkserver.ensure_running
os.environ.update(LATER="before", OMP_NUM_THREADS="7")
def ensure_running():
    os.environ["LATER"] = "changed"
    os.kill(os.getpid(), signal.SIGINT)
    begin()
forkserver.ensure_running = ensure_running
fork_server.PRELOADED = ("json",)
try:
    fork_server.prepare(1)
except KeyboardInterrupt:
    status = Path(f"/proc/{fork_server.place()[1]}/status").read_text()
    held_back = int(status.partition("SigBlk:")[2].split()[0], 16)
    assert all(held_back >> (number - 1) & 1 for number in fork_server.WATCHED)
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())
    print("interrupted", os.environ["LATER"], os.environ["OMP_NUM_THREADS"])
"""


def test_one_that_nobody_has_used_is_begun_again_with_other_threads_or_ended():
    done = subprocess.run([sys.executable, "-c", REPLACED], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_it_is_begun_before_a_command_imports_anything_if_it_starts_a_run(tmp_path):
    def begins(*arguments):
        command = [sys.executable, "-c", TRACED, *arguments]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=60, check=False)
        return done.stdout.startswith("1\n")

    assert begins("run", str(tmp_path / "absent.toml"))
    assert begins("run", "--resume", str(tmp_path / "absent"))
    assert not begins("run", str(tmp_path / "absent.toml"), "--dry-run")
    assert not begins("run", "--help")
    assert not begins("plan", str(tmp_path / "absent.toml"))


def test_a_refused_recipe_leaves_none(tmp_path):
    (tmp_path / "refused.toml").write_text("run = { step = 1 }")
    cosmos = CommandLine(tmp_path)
    cosmos("run", "refused.toml", code=2)
    assert cosmos.left_behind() == []


def test_ctrl_c_while_it_is_begun_is_kept_for_the_command():
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "interrupted changed 7\n", done.stderr


def test_a_long_name_of_the_folder_for_temporary_files_is_no_hindrance(tmp_path, monkeypatch):
    deep = tmp_path / ("a" * 100)
    deep.mkdir()
    monkeypatch.setenv("TMPDIR", str(deep))
    done = subprocess.run([sys.executable, "-c", REPLACED], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_what_hinders_it_is_told_once_it_is_needed(tmp_path, monkeypatch):
    def told(recipe, place):
        monkeypatch.setenv("TMPDIR", str(place))
        command = [sys.executable, "-c", HINDERED, "run", str(recipe)]
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=60, check=False, cwd=tmp_path)
        return done.stderr

    assert "no such recipe" in told("absent.toml", "/tmp")
    deep = tmp_path / ("a" * 100)
    deep.mkdir()
    for place, named in [("/var/tmp", "/var/tmp"), (deep, "/tmp")]:
        words = f"cosmos: the fork server could not begin; it has a socket in {named}: OSError: no folder left\n"
        assert told(RECIPE, place) == words
