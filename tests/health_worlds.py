"""Real processes on one health channel, for tests: each runs a piece of code, all at the same time."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time

import pytest

from cosmos_core.replica.health_channel import Connection, Join

MEMBER = """
import ctypes, os, sys, threading, time
from cosmos_core.errors import CosmosError, ProcessLostError, TrainingError
from cosmos_core.replica.health_channel import FollowerChannel
from cosmos_core.replica.health_leader import LeaderChannel
rank, size = int(sys.argv[1]), int(sys.argv[2])

def end(error):
    print("lost:" if isinstance(error, ProcessLostError) else "told:", error, flush=True)
    os._exit(1)

def stuck():
    ctypes.CDLL(None).pause()
    time.sleep(60)

if rank == 0:
    line = LeaderChannel(name="policy-0", size=size, token="t", host="127.0.0.1", end=end, patience_s=3.0)
    print(line.port, flush=True)
else:
    address = ("127.0.0.1", int(sys.argv[4]))
    line = FollowerChannel(name="policy-0", rank=rank, token="t", address=address, end=end, patience_s=3.0)
try:
    with line:
        if rank == 0:
            line.meet(20.0, lambda: False)
        print("joined", flush=True)
        sys.stdin.readline()
        exec(sys.argv[3])
    print("done", flush=True)
except CosmosError as error:
    print("raised lost:" if isinstance(error, ProcessLostError) else "raised:", error, flush=True)
    sys.exit(1)
"""


@pytest.fixture
def world():
    """Start one process for each piece of code; all run theirs at the same time."""
    started = []

    def member(*arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", MEMBER, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    def start(*codes: str) -> list[subprocess.Popen[str]]:
        leader = member("0", str(len(codes)), codes[0])
        port = leader.stdout.readline().strip()
        members = [leader, *(member(str(rank), str(len(codes)), codes[rank], port) for rank in range(1, len(codes)))]
        for process in members:
            assert process.stdout.readline() == "joined\n"
        for process in members:
            process.stdin.write("\n")
            process.stdin.flush()
        return members

    yield start
    for process in started:
        process.kill()
        process.communicate()


def outputs(members: list[subprocess.Popen[str]], within_s: float = 20.0) -> list[str]:
    deadline = time.monotonic() + within_s
    return [process.communicate(timeout=max(0.01, deadline - time.monotonic()))[0].strip() for process in members]


BESIEGED = """
import resource, sys
from cosmos_core.replica import health_leader
from cosmos_core.replica.health_leader import LeaderChannel

health_leader._JOIN_S, health_leader._MOST_STRANGERS = float(sys.argv[1]), int(sys.argv[2])
ended = []
line = LeaderChannel(name="policy-0", size=2, token="t", host="127.0.0.1", end=ended.append)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
print(line.port, flush=True)
line.meet(20.0, lambda: False)
print("met", ended, flush=True)
sys.stdin.readline()
"""


def besiege(join_s: str, most: str) -> str:
    """What a leader says once its follower got through to it, past a hundred strangers who say nothing."""
    with contextlib.ExitStack() as stack:
        leader = stack.enter_context(
            subprocess.Popen(
                [sys.executable, "-c", BESIEGED, join_s, most], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
        )
        stack.callback(leader.kill)
        address = ("127.0.0.1", int(leader.stdout.readline()))
        for _ in range(100):
            stack.enter_context(socket.create_connection(address))
        connection = Connection(socket.create_connection(address), 0)
        stack.callback(connection.close)
        connection.send(Join(rank=1, token="t", pid=1))
        return leader.stdout.readline()
