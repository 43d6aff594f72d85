"""Processes that are forked instead of started."""

import os
import signal
import subprocess
import sys
import time

import pytest

from cosmos_core.protocols import ProcessSpec
from cosmos_core.run import fork_server
from cosmos_core.run.launch import forks
from tests import processes


@pytest.fixture
def started(tmp_path, monkeypatch):
    """Starts a module; what is left of it is killed."""
    children = []

    def start(module, *arguments, **environment):
        spec = ProcessSpec(name=module, module=module, arguments=arguments, environment=environment)
        children.append(forks.start(spec, tmp_path / "output"))
        return children[-1]

    monkeypatch.setattr(fork_server, "PRELOADED", processes.PRELOADED)  # the server of the session, if it runs
    fork_server.prepare(1)
    yield start
    for child in children:
        child.send_signal(signal.SIGKILL)
        assert child.wait(10) is not None


def test_it_imports_nothing_twice_and_is_not_begun_where_there_are_gpus(started, tmp_path, monkeypatch):
    # It imports nothing twice and warns of nothing.
    child = started("cosmos_core.policy", "--help")
    assert child.wait(60) == 0
    said = (tmp_path / "output").read_text()
    assert said.startswith("usage: python -m cosmos_core.policy")
    assert "Warning" not in said
    # Where there are gpus nothing is begun.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(fork_server.forkserver, "ensure_running", lambda: pytest.fail("a fork server was begun"))
    assert not fork_server.prepare(1)


def test_exit_codes_and_signals_are_told_apart(started, tmp_path):
    failed = started("json.tool", str(tmp_path / "absent"))
    assert failed.wait(60) not in (None, 0)
    child = started("http.server", "0", "--bind", "127.0.0.1")
    assert child.poll() is None
    assert child.wait(0.05) is None
    child.send_signal(signal.SIGTERM)
    assert child.wait(10) == -signal.SIGTERM
    hasty = started("http.server", "0", "--bind", "127.0.0.1")
    hasty.send_signal(signal.SIGTERM)
    assert hasty.wait(10) == -signal.SIGTERM
    child.send_signal(signal.SIGTERM)

    # A process leads a session of its own.
    child = started("http.server", "0", "--bind", "127.0.0.1")
    deadline = time.monotonic() + 20
    while os.getsid(child.pid) != child.pid and time.monotonic() < deadline:
        time.sleep(0.01)
    assert os.getsid(child.pid) == child.pid
    child.send_signal(signal.SIGKILL)
    assert child.wait(10) == -signal.SIGKILL


def test_a_module_runs_as_by_the_interpreter_and_its_output_is_kept(started, tmp_path, monkeypatch):
    # Its environment is that of its starter now.
    monkeypatch.setenv("LATE", "of the starter")
    parent = "os.environ['COSMOS_PARENT_PID'] == str(os.getppid())"
    show = f"import os; print(os.environ['LATE'], os.environ['MARK'], os.environ.get('PYTHONSAFEPATH'), {parent})"
    assert started("timeit", "-n1", "-r1", "-s", show, "pass", MARK="of the process").wait(60) == 0
    assert (tmp_path / "output").read_text().startswith("of the starter of the process None True\n")
    (tmp_path / "calendar.py").write_text("raise SystemExit('imported from the current folder')")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "output").write_text("before\n")
    assert started("calendar", "2026", "11").wait(60) == 0
    said = (tmp_path / "output").read_text()
    assert said.startswith("before\n")
    assert "November 2026" in said
    assert "cosmos" not in said


SIGNALLED = """
import sys
from pathlib import Path
import psutil
from cosmos_core.protocols import ProcessSpec
from cosmos_core.run import fork_server
from cosmos_core.run.launch import forks
fork_server.PRELOADED = ("json",)
fork_server.prepare(1)
number = int(sys.argv[2])
def start(module, *arguments):
    return forks.start(ProcessSpec(name=module, module=module, arguments=arguments), Path(sys.argv[1]))
child = start("http.server", "0", "--bind", "127.0.0.1")
psutil.Process(child.pid).parent().send_signal(number)
assert start("calendar", "2026", "11").wait(60) == 0
assert child.poll() is None
child.send_signal(number)
assert child.wait(20) == -number
"""

KILLED = (
    SIGNALLED[: SIGNALLED.index("psutil.Process")]
    + """
server = psutil.Process(child.pid).parent()
child.send_signal(0)
# It would not leave by itself.
psutil.Process(child.pid).suspend()
server.kill()
assert child.wait(20) == -9
assert not psutil.pid_exists(child.pid) or psutil.Process(child.pid).status() == psutil.STATUS_ZOMBIE
again = [start("http.server", "0", "--bind", "127.0.0.1") for _ in range(2)]
assert all(psutil.Process(each.pid).parent().ppid() == psutil.Process().pid for each in again)
for each in again:
    each.send_signal(9)
    assert each.wait(20) == -9
# One that does not answer is ended, and begun again.
last = start("http.server", "0", "--bind", "127.0.0.1")
server = psutil.Process(last.pid).parent()
server.suspend()
fork_server._ANSWER_S = 1.0
assert start("calendar", "2026", "11").wait(60) == 0
assert not server.is_running() or server.status() == psutil.STATUS_ZOMBIE
assert last.wait(20) == -9
"""
)


def test_one_that_is_killed_is_begun_again_and_its_forks_are_gone_before_they_are_said_to_be(tmp_path):
    command = [sys.executable, "-c", KILLED, tmp_path / "output", "9"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_what_is_sent_to_all_of_a_group_ends_neither_it_nor_its_forks(tmp_path):
    for number in [signal.SIGTERM, signal.SIGHUP]:
        command = [sys.executable, "-c", SIGNALLED, tmp_path / "output", str(int(number))]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
