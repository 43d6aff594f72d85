"""A gradient group over NCCL loses a member, as it forms or in a sum: the other one lives, and goes on with a new one.

A sum that returns is whole, and the one in which the member is lost ends by an error of NCCL's, not by an interruption.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.multiprocessing as processes
from torch.distributed import PrefixStore, TCPStore

from cosmos_core.policy.processes.backend import connect
from cosmos_core.policy.processes.group import GradientGroup, GradientGroupError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices: NCCL refuses two ranks on one"),
    pytest.mark.timeout(300),
]

WHOLE = 2.0
MANY = 1 << 28
"""Numbers of a sum that takes long enough, over sockets, to lose a member in the middle of it."""


def member(port: int, gpu: int, generation: int, rank: int, until: float) -> GradientGroup:
    """A member of a generation; it waits for others until then."""
    device = torch.device("cuda", gpu)
    torch.cuda.set_device(device)
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60), wait_for_workers=False)
    backend = connect(
        PrefixStore(str(generation), store), rank=rank, size=2, address="127.0.0.1", device=device, timeout_s=60.0
    )

    def interrupted() -> bool:
        return time.time() > until

    return GradientGroup(
        generation=generation, rank=rank, size=2, backend=backend, device=device, interrupted=interrupted
    )


def dies(port: int) -> None:
    """Takes part in one sum, and is killed in the next."""
    group = member(port, 1, 1, 1, time.time() + 60)
    group.sum(torch.ones(1 << 20, device="cuda"))
    summed = torch.ones(MANY, device="cuda")
    torch.cuda.synchronize()
    threading.Timer(0.15, os.kill, (os.getpid(), signal.SIGKILL)).start()
    while True:
        group.sum(summed.fill_(1.0))


def vanishes(port: int, *, builds: bool) -> None:
    """Is killed between the meeting and the communicator, or between that and the first sum."""
    if builds:
        member(port, 1, 1, 1, time.time() + 60)
    else:
        store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60), wait_for_workers=False)
        PrefixStore("1", store).set("here-1", "")
    os.kill(os.getpid(), signal.SIGKILL)


def is_left(port: int, answers: Any) -> None:
    """Loses the other member before the first sum, and is in the next generation."""
    try:
        member(port, 0, 1, 0, time.time() + 60).sum(torch.ones(1 << 20, device="cuda"))
        answers.put("")
    except (GradientGroupError, RuntimeError) as error:
        answers.put(str(error))
    goes_on(port, answers)


def joins(port: int) -> None:
    """The new member of the second generation."""
    group = member(port, 1, 2, 1, time.time() + 120)
    group.sum(torch.ones(1 << 20, device="cuda"))
    # The other one has its sum, too, before this one's end can be taken for an error.
    time.sleep(1.0)


def lives(port: int, answers: Any) -> None:
    """Loses the other member, leaves the generation, and is in the next."""
    group, size = member(port, 0, 1, 0, time.time() + 90), 1 << 20
    try:
        while True:
            summed = torch.ones(size, device="cuda")
            group.sum(summed)
            if not bool((summed == WHOLE).all()):
                answers.put(f"a sum returned that is not whole: from {summed.min()} to {summed.max()}")
                return
            size = MANY
    except GradientGroupError as error:
        answers.put(str(error))
    goes_on(port, answers)


def goes_on(port: int, answers: Any) -> None:
    """Is in the next generation."""
    # Longer than NCCL's watchdog takes to act on the failure.
    time.sleep(5.0)
    again = torch.ones(1 << 20, device="cuda")
    member(port, 0, 2, 0, time.time() + 60).sum(again)
    answers.put((float(again.min()), float(again.max())))


LOSSES: dict[str, tuple[Any, dict[str, bool], Any, str]] = {
    "in a sum": (dies, {}, lives, "generation 1: a collective failed: "),
    "before its first sum": (vanishes, {"builds": True}, is_left, "NCCL"),
    "before the communicator": (vanishes, {"builds": False}, is_left, "NCCL"),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_the_survivor_goes_on(monkeypatch: pytest.MonkeyPatch, loss: str) -> None:
    # As `cosmos run` starts policies; four times the second is how long the watchdog waits before it acts.
    monkeypatch.setenv("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")
    # Sockets, as between hosts: of a process that is gone NCCL may hear nothing through shared memory.
    for name in ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "500")
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    spawn = processes.get_context("spawn")
    answers = spawn.Queue()
    ends, how, survives, said = LOSSES[loss]
    survivor = spawn.Process(target=survives, args=(store.port, answers))
    lost, joiner = (
        spawn.Process(target=ends, args=(store.port,), kwargs=how),
        spawn.Process(target=joins, args=(store.port,)),
    )
    for process in (survivor, lost):
        process.start()
    try:
        assert said in answers.get(timeout=120)
        joiner.start()
        assert answers.get(timeout=120) == (WHOLE, WHOLE)
        survivor.join(30)
        assert (survivor.exitcode, lost.exitcode) == (0, -signal.SIGKILL)
    finally:
        for process in (survivor, lost, joiner):
            if process.pid is not None:
                process.kill()
