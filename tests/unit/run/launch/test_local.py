import json
import os
import re
import signal
import time
from pathlib import Path

import pytest

from cosmos_core.run.launch import ProcessSpec
from cosmos_core.run.launch.local import LocalLauncher, last_error, thread_environment


@pytest.fixture
def launcher(tmp_path, monkeypatch):
    (tmp_path / "napper.py").write_text(
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "print(f'child {child.pid}.', flush=True)\n"
        "time.sleep(60)\n"
    )
    (tmp_path / "stubborn.py").write_text(
        "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('up', flush=True)\ntime.sleep(60)\n"
    )
    (tmp_path / "saver.py").write_text(
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.3), print('saved', flush=True), sys.exit()))\n"
        "print('up', flush=True)\ntime.sleep(60)\n"
    )
    (tmp_path / "broken.py").write_text("raise SystemExit('no such model: nope')\n")
    (tmp_path / "printer.py").write_text(
        "import os\n"
        "print(os.environ['OMP_NUM_THREADS'], os.getsid(0) == os.getpid(), os.environ['COSMOS_PARENT_PID'])\n"
    )
    (tmp_path / "importer.py").write_text("import queue, cosmos_algorithm_grpo\nprint('unharmed')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    launcher = LocalLauncher(tmp_path / "logs")
    yield launcher
    launcher.stop(0.1)


def start(launcher, module, **environment):
    launcher.start(ProcessSpec(name=module, module=module, arguments=(), environment=environment))


def wait_for(condition, timeout_s=10.0):
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found


def is_running(pid):
    try:
        with Path(f"/proc/{pid}/stat").open() as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_failed_process_is_reported_once_with_its_last_words(launcher, tmp_path):
    start(launcher, "broken")
    exits = wait_for(launcher.exits)
    assert [(end.name, end.code, end.error) for end in exits] == [("broken", 1, "no such model: nope")]
    assert launcher.exits() == []
    assert launcher.running() == []

    # A logged error is preferred to the output.
    lines = [{"level": "ERROR", "message": "first"}, {"level": "ERROR", "message": "disk full"}, {"level": "INFO"}]
    (tmp_path / "policy-0.jsonl").write_text("\n".join(json.dumps(line) for line in lines) + '\n{"level": "ERR')
    (tmp_path / "policy-0.log").write_text("noise\n")
    assert last_error(tmp_path, "policy-0") == "disk full"
    assert last_error(tmp_path, "rollout-0") == ""

    # A module that is not there says so.
    start(launcher, "no_such_module_at_all")
    assert "no_such_module_at_all" in wait_for(launcher.exits)[0].error


def test_processes_lead_a_session_with_bounded_threads_and_know_their_parent(launcher, tmp_path, monkeypatch):
    start(launcher, "printer", **thread_environment(3))
    assert wait_for(launcher.exits)[0].code == 0
    assert (tmp_path / "logs" / "printer.log").read_text() == f"3 True {os.getpid()}\n"

    # Nothing is imported from the folder where a run is started.
    (tmp_path / "here").mkdir()
    for name in ("queue.py", "cosmos_algorithm_grpo.py"):
        (tmp_path / "here" / name).write_text("raise SystemExit('imported from the current folder')\n")
    monkeypatch.chdir(tmp_path / "here")
    start(launcher, "importer")
    assert [(end.code, end.error) for end in wait_for(launcher.exits)] == [(0, "")]
    assert (tmp_path / "logs" / "importer.log").read_text() == "unharmed\n"


def test_nothing_is_left_behind(launcher, tmp_path):
    log = tmp_path / "logs" / "napper.log"
    for number in (signal.SIGKILL, signal.SIGTERM, None):
        start(launcher, "napper")
        child = int(wait_for(lambda: log.exists() and re.search(r"child (\d+)\.", log.read_text()))[1])
        assert is_running(child)
        if number == signal.SIGKILL:
            os.kill(launcher._processes["napper"].pid, number)
        elif number == signal.SIGTERM:
            launcher.terminate("napper")
        else:
            launcher.stop(5)
        if number is not None:
            assert wait_for(launcher.exits)[0].code == -number
        wait_for(lambda child=child: not is_running(child))
        assert launcher.running() == []
        log.unlink()


def test_a_process_has_time_to_save(launcher, tmp_path):
    start(launcher, "saver")
    log = tmp_path / "logs" / "saver.log"
    wait_for(lambda: log.exists() and log.read_text())
    launcher.stop(20)
    assert log.read_text() == "up\nsaved\n"


def test_a_process_that_ignores_the_request_is_killed(launcher, tmp_path):
    start(launcher, "stubborn")
    log = tmp_path / "logs" / "stubborn.log"
    wait_for(lambda: log.exists() and log.read_text())
    began = time.monotonic()
    launcher.stop(0.2)
    assert time.monotonic() - began < 5
    assert launcher.running() == []
