from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from cosmos_core.replica import lifetime
from cosmos_core.replica.lifetime import bounded_life

CHILD = """
import sys, threading, time
from cosmos_core.replica.lifetime import bounded_life
stop = threading.Event()
with bounded_life(stop, grace_s=0.3):
    print("ready", flush=True)
    {body}
print("left", flush=True)
"""
PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", {child!r}], stdout=subprocess.PIPE, text=True)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(60)
"""


def start(code: str) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    process.first_line = process.stdout.readline().strip()
    return process


def test_sigterm_sets_stop_and_the_process_leaves_in_its_own_way():
    """Ctrl-C is left to the supervisor."""
    with start(CHILD.format(body="stop.wait(60)")) as child:
        child.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            child.wait(0.2)
        child.send_signal(signal.SIGTERM)
        assert child.wait(5) == 0
        assert child.stdout.read() == "left\n"


def test_a_process_that_is_stuck_is_ended_after_its_grace():
    # A main thread inside a long call into C runs no signal handler.
    body = "import ctypes; ctypes.CDLL(None).pause(); time.sleep(60)"
    with start(CHILD.format(body=body)) as child:
        time.sleep(0.1)
        child.send_signal(signal.SIGTERM)
        assert child.wait(5) == 128 + signal.SIGTERM
        assert child.stdout.read() == ""


def test_a_process_does_not_outlive_its_parent():
    child_code = CHILD.format(body="time.sleep(60)").replace(
        "stop =", "import cosmos_core.replica.lifetime as l; l._PARENT_CHECK_S = 60; stop =", 1
    )
    with start(PARENT.format(child=child_code)) as parent:
        child = int(parent.first_line)
        parent.kill()
        parent.wait(5)
        end = time.monotonic() + 5
        while _is_running(child):
            assert time.monotonic() < end, "the child lives on"
            time.sleep(0.02)


def test_a_parent_that_ended_is_noticed_even_if_it_did_while_the_process_was_starting(monkeypatch):
    monkeypatch.setattr("cosmos_core.replica.lifetime._PARENT_CHECK_S", 0.02)
    stop = threading.Event()
    monkeypatch.setenv(lifetime.PARENT, str(os.getppid()))
    with bounded_life(stop, grace_s=60):
        assert not stop.wait(0.2)
        assert lifetime.PARENT not in os.environ
        with monkeypatch.context() as patch:  # as it is seen where the kernel tells nothing
            patch.setattr(os, "getppid", lambda: 1)
            assert stop.wait(2)
    stop.clear()
    monkeypatch.setenv(lifetime.PARENT, "999999999")
    with bounded_life(stop, grace_s=60):
        assert stop.wait(2)


def test_signals_are_as_before_afterwards():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    stop = threading.Event()
    with bounded_life(stop):
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.wait(2)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    assert "lifetime" not in {thread.name for thread in threading.enumerate()}


@pytest.fixture(autouse=True)
def _no_death_signal_for_the_test_process(monkeypatch):
    monkeypatch.setattr("cosmos_core.replica.lifetime.die_with_parent", lambda _: None)


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
