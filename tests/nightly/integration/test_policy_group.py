"""A gradient group of real processes loses a member."""

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

MEMBER = """
    import sys, time, torch
    torch.set_num_threads(1)
    from cosmos_core.policy.processes.group import GradientGroupError
    from cosmos_core.policy.processes.rendezvous import form_group
    from cosmos_core.policy.processes.rendezvous import GroupStore
    rank, size = int(sys.argv[1]), int(sys.argv[2])
    if rank == 0:
        store = GroupStore("127.0.0.1")
        print(store.endpoint, flush=True)
        endpoint = store.endpoint
    else:
        endpoint = sys.argv[3]
    group = form_group(generation=1, rank=rank, size=size, store=endpoint, address="127.0.0.1",
                       device=torch.device("cpu"), interrupted=lambda: False, timeout_s=60.0)
    tensor = torch.ones(1000)
    group.sum(tensor)
    print("joined", tensor[0].item(), flush=True)
    if rank == size - 1:
        time.sleep(120)
    try:
        group.sum(tensor)
    except GradientGroupError as error:
        print("broken", error, flush=True)
"""


@pytest.fixture
def members():
    started = []

    def start(*arguments):
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(MEMBER), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def test_all_survivors_learn_of_a_killed_member_within_seconds(members):
    first = members("0", "3")
    endpoint = first.stdout.readline().strip()
    second, third = members("1", "3", endpoint), members("2", "3", endpoint)
    for member in (first, second, third):
        assert member.stdout.readline() == "joined 3.0\n"
    time.sleep(0.5)
    os.kill(third.pid, signal.SIGKILL)
    start = time.monotonic()
    for survivor in (first, second):
        assert survivor.stdout.readline().startswith("broken generation 1: a collective failed")
    assert time.monotonic() - start < 5.0
