"""Runs that go wrong end as failed, promptly, saying why, with nothing left behind (the `cosmos` fixture looks)."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.commandline import CommandLine

Arguments = Callable[..., list[str]]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

IN_TERMINAL = """
import fcntl, os, signal, sys, termios
signal.signal(signal.SIGHUP, signal.SIG_DFL)
os.setsid()
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.executable, [sys.executable, "-P", "-m", "cosmos_core.cli", *sys.argv[1:]])
"""
ENDLESS = ("warmup.steps=100000",)


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[str], timeout_s: float = 180.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_training(run: Path) -> Callable[[], bool]:
    logs = {run / "logs" / "policy-0.jsonl": "generation 1", run / "logs" / "rollout-0.jsonl": "started, incarnation"}
    return lambda: all(log.exists() and words in log.read_text() for log, words in logs.items())


def pid_of(run: Path, name: str) -> int:
    lines = (run / "logs" / f"{name}.jsonl").read_text().splitlines()
    started = [found for line in lines if (found := re.search(r"started, incarnation \w+, pid (\d+)", line))]
    return int(started[-1][1])


def lives(pid: int) -> bool:
    """Whether a process has not ended; it may be nobody's, where nobody reaps it."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def summary(run: Path) -> dict[str, object]:
    return json.loads((run / "summary.json").read_text())


def test_a_killed_replica_ends_the_run_promptly(cosmos: CommandLine, arithmetic: Arguments) -> None:
    run = cosmos.folder / "runs" / "killed"
    process = cosmos.start("run", *arithmetic("killed", *ENDLESS, "launch.restarts=0"))
    wait_until(is_training(run), process)
    os.kill(pid_of(run, "rollout-0"), signal.SIGKILL)
    killed_at = time.monotonic()
    output, _ = process.communicate(timeout=60)
    assert time.monotonic() - killed_at < 30
    assert process.returncode == 1, output
    assert "rollout-0" in output
    assert "killed by signal 9" in output
    assert summary(run)["outcome"] == "failed"
    assert "rollout-0" in str(summary(run)["reason"])
    assert (run / "report.html").exists()


def test_a_killed_process_of_a_replica_ends_the_run_and_is_named_once(
    cosmos: CommandLine, arithmetic: Arguments
) -> None:
    run = cosmos.folder / "runs" / "broken"
    process = cosmos.start("run", *arithmetic("broken", *ENDLESS, "policy.mesh.dp_shard=2", "launch.restarts=0"))
    wait_until(is_training(run), process)
    os.kill(pid_of(run, "policy-0.1"), signal.SIGKILL)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1, output
    ended = [line for line in output.splitlines() if " ended: " in line]
    assert len(ended) == 1, output
    reason = str(summary(run)["reason"])
    assert reason == "policy-0.1: killed by signal 9"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_all_processes_of_a_job_stops_the_run_with_a_checkpoint(
    cosmos: CommandLine, arithmetic: Arguments, number: signal.Signals
) -> None:
    run = cosmos.folder / "runs" / "job"
    before = signal.signal(number, signal.SIG_DFL)  # what is ignored here, as by `nohup`, is so there
    process = cosmos.start("run", *arithmetic("job", *ENDLESS), leads_group=True)
    signal.signal(number, before)
    wait_until(is_training(run), process)
    os.killpg(process.pid, number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert (summary(run)["outcome"], summary(run)["restarts"]) == ("stopped", {}), output
    assert list((run / "checkpoints").iterdir())


def test_a_terminal_that_closes_stops_the_run_with_a_checkpoint(cosmos: CommandLine, arithmetic: Arguments) -> None:
    run = cosmos.folder / "runs" / "terminal"
    terminal, end = pty.openpty()
    command = [sys.executable, "-c", IN_TERMINAL, "run", *arithmetic("terminal", *ENDLESS)]
    process = subprocess.Popen(command, cwd=cosmos.folder, stdin=end, stdout=end, stderr=end, text=True)
    os.close(end)
    os.set_blocking(terminal, False)

    def is_training_while_read() -> bool:
        with contextlib.suppress(BlockingIOError):
            os.read(terminal, 1 << 16)
        return is_training(run)()

    wait_until(is_training_while_read, process)
    os.close(terminal)
    assert process.wait(60) == 130
    deadline = time.monotonic() + 20  # what it has forked ends with it
    while cosmos.left_behind() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert summary(run)["outcome"] == "stopped"
    assert list((run / "checkpoints").iterdir())


def test_a_second_ctrl_c_kills_the_run(cosmos: CommandLine, arithmetic: Arguments) -> None:
    run = cosmos.folder / "runs" / "impatient"
    process = cosmos.start("run", *arithmetic("impatient", *ENDLESS))
    wait_until(is_training(run), process)
    os.kill(pid_of(run, "policy-0"), signal.SIGSTOP)  # it cannot come to a step's end any more
    process.send_signal(signal.SIGINT)
    while "Ctrl-C again to kill the run" not in (line := process.stdout.readline()):
        assert line, "it has ended"
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert "killed by a second Ctrl-C" in str(summary(run)["reason"])


def test_replicas_do_not_outlive_a_killed_supervisor(cosmos: CommandLine, arithmetic: Arguments) -> None:
    run = cosmos.folder / "runs" / "orphan"
    process = cosmos.start("run", *arithmetic("orphan", *ENDLESS))
    wait_until(is_training(run), process)
    pids = [pid_of(run, name) for name in ("policy-0", "rollout-0")]
    process.kill()
    process.communicate()
    deadline = time.monotonic() + 20
    while any(map(lives, pids)):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_run_that_runs_is_told_of_and_not_started_again(cosmos: CommandLine, arithmetic: Arguments) -> None:
    run = cosmos.folder / "runs" / "busy"
    process = cosmos.start("run", *arithmetic("busy", *ENDLESS))
    wait_until(is_training(run), process)
    assert "busy: running" in cosmos("status", "runs/busy")
    assert "is running now" in cosmos("run", "--resume", "runs/busy", code=2)
    assert "is running now" in cosmos("run", *arithmetic("busy", *ENDLESS), "--overwrite", code=2)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert "busy: stopped" in cosmos("status", "runs/busy")


def test_a_failing_hook_does_not_fail_the_run(
    cosmos: CommandLine, arithmetic: Arguments, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = cosmos.folder / "site"
    info = site / "bad_hook-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: bad-hook\nVersion: 1.0\nRequires-Dist: cosmos-core>=0.1\n"
    )
    (info / "entry_points.txt").write_text("[cosmos_core.hooks]\nbad = bad_hook\n")
    (info / "RECORD").write_text("bad_hook.py,,\n")
    (site / "bad_hook.py").write_text(
        "from cosmos_core.protocols import Provider, hookimpl\n"
        "class Bad:\n"
        "    @hookimpl\n"
        "    def cosmos_step_finished(self, step):\n"
        "        raise RuntimeError(f'step {step} displeases')\n"
        "@hookimpl\n"
        "def cosmos_hook():\n"
        "    return Provider(create=lambda options, context: Bad())\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(site))
    output = cosmos("run", *arithmetic("hooked", 'tracking.hooks=["bad"]', "run.steps=2"))
    assert output.count("step 1 displeases; it is switched off, the run goes on") == 1
    assert summary(cosmos.folder / "runs" / "hooked")["outcome"] == "finished"


def test_ctrl_c_while_the_replicas_start_stops_without_a_word_of_failure(
    cosmos: CommandLine, arithmetic: Arguments
) -> None:
    run = cosmos.folder / "runs" / "early"
    process = cosmos.start("run", *arithmetic("early", *ENDLESS))
    output = cosmos.interrupt_at(process, run / "controller.json")
    assert process.returncode == 130, output
    assert "waiting for the replicas to start" in output
    assert " ended: " not in output
    assert (summary(run)["outcome"], summary(run)["reason"]) == ("stopped", "")
