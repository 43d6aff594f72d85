"""Publishers in processes of their own."""

import functools
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from cosmos_core.errors import WeightSyncError
from cosmos_core.protocols import TensorSlice
from cosmos_core.transport.directives import WeightTarget
from cosmos_core.weights.digest import digest_of
from cosmos_core.weights.publisher import WeightPublisher
from cosmos_core.weights.receiver import WeightReceiver

torch.set_num_threads(1)

SHAPE = (12000, 2000)
PUBLISH = f"""
import sys
from pathlib import Path
import torch
from cosmos_core.weights.publisher import WeightPublisher
from cosmos_core.weights.disk import VersionWriter
torch.set_num_threads(1)
writer = VersionWriter(sys.argv[2], "run", is_only=True, removes=True)
publisher = WeightPublisher("run", directory=Path(sys.argv[1]), writer=writer)
weights = torch.arange({SHAPE[0] * SHAPE[1]}, dtype=torch.float32).view({SHAPE})
print(publisher.endpoint, publisher.publish(1, {{"w": weights}}, torch.bfloat16).digest, flush=True)
sys.stdin.read()
"""
LAYOUT = {0: [(TensorSlice(name="w", start=(0, 0), shape=SHAPE), "bfloat16")]}


class Publisher:
    def __init__(self, directory: Path):
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", PUBLISH, str(directory / "files"), str(directory / "stored")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def read(self):
        self.endpoint, self.digest = self.process.stdout.readline().split()
        return self


@pytest.fixture
def publishers(tmp_path):
    (tmp_path / "files").mkdir()
    started = [Publisher(tmp_path) for _ in range(2)]
    yield [publisher.read() for publisher in started]
    for publisher in started:
        publisher.process.send_signal(signal.SIGCONT)
        publisher.process.kill()
        publisher.process.communicate()


def fetch(transport, publishers, timeout_s=20.0, during=None, *, directory=None, stall_s=1.0):
    target = WeightTarget(
        version=1,
        digest=publishers[0].digest,
        sources=tuple(publisher.endpoint for publisher in publishers),
        hosts=("here",) * len(publishers),
    )
    weights = torch.full(SHAPE, torch.nan, dtype=torch.bfloat16)
    with (
        WeightReceiver(transport, run_id="run", host="here", stall_s=stall_s, directory=directory) as receiver,
        receiver.fetch(target, LAYOUT, timeout_s) as pieces,
    ):
        for number, (_, piece, data) in enumerate(pieces):
            weights[tuple(slice(s, s + n) for s, n in zip(piece.start, piece.shape, strict=True))] = data
            if during and not number:
                during()
    return digest_of({"w": weights})


@pytest.mark.slow
def test_weights_reach_another_process_whatever_becomes_of_a_publisher(publishers, tmp_path):
    expected = publishers[0].digest
    for transport in ("auto", "shared-memory", "zmq", "gloo"):
        assert fetch(transport, publishers) == expected

    publishers[0].process.send_signal(signal.SIGSTOP)
    assert fetch("zmq", publishers) == expected
    publishers[0].process.send_signal(signal.SIGCONT)
    assert fetch("zmq", publishers, during=publishers[0].process.kill) == expected

    started = time.monotonic()
    with pytest.raises(WeightSyncError, match=f"cannot be fetched: {publishers[0].endpoint}: no answer for 1 s"):
        fetch("zmq", publishers[:1], timeout_s=2)
    assert time.monotonic() - started < 4

    publishers[0].process.wait()
    files = tmp_path / "files"
    assert len(list(files.iterdir())) == 2
    with WeightPublisher("run", directory=files):
        assert len(list(files.iterdir())) == 1
    assert fetch("shared-memory", publishers[1:]) == expected
    publishers[1].process.communicate("")
    assert list(files.iterdir()) == []

    with pytest.raises(WeightSyncError, match=f"{publishers[1].endpoint}: no answer for 1 s"):
        fetch("auto", publishers, timeout_s=3)
    for transport in ("auto", "disk"):
        assert fetch(transport, publishers, timeout_s=3, directory=str(tmp_path / "stored")) == expected


@pytest.mark.slow
def test_a_process_group_with_a_publisher_that_stalls_or_dies_is_left_for_another(publishers):
    before = set(threading.enumerate())
    expected = publishers[0].digest
    frozen = publishers[0].process
    # Longer than a group takes to form on a busy machine.
    fetch_by_gloo = functools.partial(fetch, "gloo", stall_s=3.0)
    started = time.monotonic()
    assert fetch_by_gloo(publishers, during=lambda: frozen.send_signal(signal.SIGSTOP)) == expected
    assert fetch_by_gloo(publishers) == expected  # it does not even say what it holds
    assert time.monotonic() - started < 20
    # Its last answers are still to be had from the system, so that it has to be frozen before it is asked.
    with pytest.raises(WeightSyncError, match=f"cannot be fetched: {publishers[0].endpoint}: no answer for 3 s"):
        fetch_by_gloo(publishers[:1], timeout_s=8)
    frozen.send_signal(signal.SIGCONT)
    assert fetch_by_gloo(publishers, during=frozen.kill) == expected
    with pytest.raises(WeightSyncError, match=f"cannot be fetched: {publishers[1].endpoint}: "):
        fetch_by_gloo(publishers[1:], during=publishers[1].process.kill)
    assert set(threading.enumerate()) <= before
