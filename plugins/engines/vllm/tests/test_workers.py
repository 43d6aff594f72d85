"""vLLM's workers: what is left of them when their session is killed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SHARED_MEMORY = Path("/dev/shm")

MAKES_AND_WAITS = """
import multiprocessing
from multiprocessing.shared_memory import SharedMemory
from cosmos_engine_vllm.workers import started_apart

with started_apart(1):
    memory = SharedMemory(create=True, size=4096)
    lock = multiprocessing.get_context("spawn").Lock()
    print(memory.name, "sem." + lock._semlock.name.lstrip("/"), flush=True)
    input()
"""


@pytest.fixture
def replica():
    started = subprocess.Popen(
        [sys.executable, "-c", MAKES_AND_WAITS],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    yield started
    if started.poll() is None:
        os.killpg(started.pid, signal.SIGKILL)
    started.communicate()


def test_shared_memory_is_unlinked_when_the_whole_session_is_killed(replica):
    files = [SHARED_MEMORY / name for name in replica.stdout.readline().split()]
    assert len(files) == 2
    assert all(file.exists() for file in files)
    os.killpg(replica.pid, signal.SIGKILL)
    replica.communicate(timeout=20)
    end = time.monotonic() + 20
    while any(file.exists() for file in files) and time.monotonic() < end:
        time.sleep(0.02)
    assert not [file for file in files if file.exists()]
