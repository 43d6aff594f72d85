"""What ends with the starter of a fork server, and what does not."""

import contextlib
import os
import signal
import subprocess
import sys
import time

import psutil

from tests.commandline import CommandLine
from tests.runs import RECIPE

STARTER = """
import signal, sys, time
from pathlib import Path
from cosmos_core.protocols import ProcessSpec
from cosmos_core.run import fork_server
from cosmos_core.run.launch import forks
fork_server.PRELOADED = ("json",)
fork_server.prepare(1)
child = forks.start(ProcessSpec(name="x", module="lasting", arguments=()), Path(sys.argv[1]))
print(child.pid, flush=True)
time.sleep(60)
"""
LASTING = """
import threading
from cosmos_core.replica.lifetime import bounded_life
stop = threading.Event()
with bounded_life(stop):
    print("ready", flush=True)
    stop.wait(60)
print("stopped", flush=True)
"""


def test_forks_end_with_a_starter_that_is_killed(tmp_path):
    (tmp_path / "lasting.py").write_text(LASTING)
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    output = tmp_path / "output"
    starter = subprocess.Popen(
        [sys.executable, "-c", STARTER, output], stdout=subprocess.PIPE, text=True, env=environment, cwd=tmp_path
    )
    child = psutil.Process(int(starter.stdout.readline()))
    server = child.parent()
    wait_for(lambda: "ready" in output.read_text())
    assert {child.pid, server.pid} <= {process.pid for process in CommandLine(tmp_path).left_behind()}
    starter.kill()
    starter.communicate()
    psutil.wait_procs([child, server], timeout=20)
    assert not child.is_running()
    assert not server.is_running()
    assert "stopped" in output.read_text()


def test_ctrl_c_while_it_imports_is_not_its_end(tmp_path):
    script = STARTER.replace(
        "fork_server.prepare(1)", "fork_server.prepare(1); signal.signal(signal.SIGINT, signal.SIG_IGN)"
    )
    (tmp_path / "lasting.py").write_text("print('ready', flush=True)")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    (tmp_path / "slow.py").write_text("import time; time.sleep(2)")
    starter = subprocess.Popen(
        [sys.executable, "-c", script.replace('("json",)', '("slow",)'), tmp_path / "output"],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=tmp_path,
        start_new_session=True,
    )
    wait_for(lambda: len(psutil.Process(starter.pid).children()) >= 2)
    time.sleep(0.3)
    os.killpg(starter.pid, signal.SIGINT)
    assert starter.stdout.readline().strip().isdecimal()
    starter.kill()
    starter.communicate()


def test_ctrl_c_at_the_start_of_a_command_ends_it_at_once(tmp_path):
    cosmos = CommandLine(tmp_path)
    for tenths in range(4, 20, 3):
        process = cosmos.start("run", str(RECIPE), leads_group=True)
        time.sleep(tenths / 10)
        os.killpg(process.pid, signal.SIGINT)
        assert process.communicate(timeout=20)[0].endswith("cosmos: stopped by Ctrl-C\n")
        assert process.returncode == 130
    wait_for(lambda: not cosmos.left_behind())
    assert not list(tmp_path.iterdir())


def wait_for(holds):
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        with contextlib.suppress(FileNotFoundError):
            if holds():
                return
        time.sleep(0.02)
    raise AssertionError("did not come to hold in 30 s")
