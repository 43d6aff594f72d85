import gc
import os
import re
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import psutil
import pytest

from cosmos_core.errors import ConfigError, CosmosError, PluginBrokenError
from cosmos_core.run import fork, fork_server
from tests import processes

KNOWN = []


class LocatedError(PluginBrokenError):
    """As a plugin's own may be made."""

    def __init__(self, where, what):
        super().__init__(f"{where}: {what}")


def refuse():
    KNOWN.append(1)
    try:
        {}["vocab"]
    except KeyError as error:
        raise ConfigError("model.path: no such folder") from error


def break_down():
    raise LocatedError("numbers.py:3", "no rows")


def look_up():
    return {}["absent"]


def end(number):
    os.kill(os.getpid(), number)


def show_place(path):
    is_ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    path.write_text(f"{Path.cwd()} {os.environ['LATE']} {fork_server.prepare(1)} {is_ignored} {gc.isenabled()}")


def lose_server(pid):
    os.kill(pid, signal.SIGKILL)
    time.sleep(60)


@pytest.fixture(params=["of this process", "of the fork server"])
def in_fork(request, monkeypatch):
    if request.param == "of this process":
        monkeypatch.setattr(fork_server, "place", lambda: None)
    else:
        monkeypatch.setattr(fork_server, "PRELOADED", processes.PRELOADED)  # the server of the session, if it runs
        fork_server.prepare(1)
        assert fork_server.place() is not None
    return fork.in_fork


def test_a_call_in_a_fork_leaves_only_its_error(in_fork, capfd, tmp_path, monkeypatch):
    in_fork(partial(KNOWN.append, 1))
    with pytest.raises(ConfigError, match=r"^model\.path: no such folder$") as refused:
        in_fork(refuse)
    assert KNOWN == []
    # Where it was raised, and by what, is told to whoever debugs.
    assert "KeyError: 'vocab'" in str(refused.value.__cause__)
    with pytest.raises(LocatedError, match=r"^numbers\.py:3: no rows$"):
        in_fork(break_down)

    # It is where its caller is now. The fork server is of use to it, and outlives it.
    server = fork_server.place()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LATE", "set later")
    for handler in (signal.SIG_DFL, signal.SIG_IGN):
        before = signal.signal(signal.SIGHUP, handler)  # `nohup` ignores it
        in_fork(partial(show_place, tmp_path / "place"))
        signal.signal(signal.SIGHUP, before)
        assert (tmp_path / "place").read_text() == f"{tmp_path} set later True {handler == signal.SIG_IGN} True"
    assert fork_server.place() == server

    # What is no refusal shows its traceback; what was killed, or ended its process, is told.
    with pytest.raises(CosmosError, match=r"^planning ended without an answer, exit code 1: "):
        in_fork(look_up)
    if server is None:
        assert "KeyError: 'absent'" in capfd.readouterr().err
    with pytest.raises(CosmosError, match=r"^planning ended without an answer, exit code 0: .*sys\.exit"):
        in_fork(partial(sys.exit))
    with pytest.raises(CosmosError, match=r"^planning was ended by signal 9; .* memory$"):
        in_fork(partial(end, signal.SIGKILL))
    with pytest.raises(CosmosError, match=r"^planning was ended by signal 10$"):
        in_fork(partial(end, signal.SIGUSR1))

    # Ctrl-C reaches all of a terminal: whoever waits answers it.
    in_fork(partial(end, signal.SIGINT))
    assert capfd.readouterr().err == ""


def hang(path):
    path.write_text(str(os.getpid()))
    threading.Thread(target=re.fullmatch, args=(r"(a+)+b", "a" * 40)).start()  # it lets no other thread run


def test_one_that_answers_no_signal_ends_with_its_caller(in_fork, tmp_path, monkeypatch):
    for number, error, times in ((signal.SIGTERM, SystemExit, 1), (signal.SIGINT, KeyboardInterrupt, 2)):
        monkeypatch.setattr(fork, "_LEAVE_S", 0.3 if times == 1 else 30.0)
        path = tmp_path / error.__name__
        thread = threading.Thread(target=interrupt, args=(path, number, times))
        thread.start()
        with pytest.raises(error):
            in_fork(partial(hang, path))
        thread.join()
        assert not psutil.pid_exists(int(path.read_text()))


def interrupt(path, number, times):
    while not (path.exists() and path.read_text()):
        time.sleep(0.05)
    for _ in range(times):
        time.sleep(0.2)
        os.kill(os.getpid(), number)


LOST = """
import signal, sys
from functools import partial
from cosmos_core.errors import ConfigError, CosmosError
from cosmos_core.run import fork
from cosmos_core.run import fork_server
from tests.unit.run.test_planning_apart import lose_server, refuse
fork_server.PRELOADED = ("json",)
fork_server.prepare(1)
try:
    fork.in_fork(partial(lose_server, fork_server.place()[1]))
except CosmosError as error:
    assert "ended with its fork server" in str(error), error
else:
    raise AssertionError("nothing was said")
# One that does not answer is not waited for.
fork_server.prepare(1)
fork_server._IMPORTS_S = fork_server._ANSWER_S = 1.0
import os
os.kill(fork_server.place()[1], signal.SIGSTOP)
try:
    fork.in_fork(refuse)
except ConfigError:
    sys.exit(0)
"""


def test_a_fork_server_that_is_killed_or_does_not_answer_is_told_or_done_without():
    done = subprocess.run([sys.executable, "-c", LOST], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_without_its_fork_server_a_call_is_made_in_a_fork_of_this_process(monkeypatch, tmp_path):
    monkeypatch.setattr(fork_server, "place", lambda: (str(tmp_path / "gone"), os.getpid()))
    monkeypatch.setattr(fork.multiprocessing.forkserver._forkserver, "ensure_running", lambda: None)
    monkeypatch.setattr(fork.multiprocessing.forkserver._forkserver, "_forkserver_address", str(tmp_path / "gone"))
    with pytest.raises(ConfigError, match="no such folder"):
        fork.in_fork(refuse)


ORPHANED = """
import sys, time
from functools import partial
from pathlib import Path
from cosmos_core.run import fork
from cosmos_core.run import fork_server
from tests.unit.run.test_planning_apart import outlive
fork_server.PRELOADED = ("json",)
if sys.argv[2] == "fork server":
    fork_server.prepare(1)
fork.in_fork(partial(outlive, Path(sys.argv[1])))
"""


def outlive(path):
    path.write_text(str(os.getpid()))
    time.sleep(60)


@pytest.mark.parametrize("method", ["fork server", "fork"])
def test_it_ends_with_its_caller(method, tmp_path):
    caller = subprocess.Popen([sys.executable, "-c", ORPHANED, tmp_path / "pid", method])
    deadline = time.monotonic() + 60
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    child = psutil.Process(int((tmp_path / "pid").read_text()))
    caller.kill()
    caller.wait()
    child.wait(5)
