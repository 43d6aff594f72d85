"""Payloads between real processes: large arrays, and a holder that is killed."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import threading
import time

import pytest

from cosmos_core.transport.payloads import PayloadClient

HOLDER = """
import hashlib, random, sys, time
from cosmos_core.transport.payloads import PayloadServer
from cosmos_core.types import Array, Payload
server = PayloadServer("127.0.0.1").start()
block = random.Random(0).randbytes(1 << 20)
for lease in range(8):
    data = bytearray(block) * 64
    data[:4] = lease.to_bytes(4, "little")
    array = Array(dtype="bfloat16", shape=(64, 1 << 19), data=memoryview(data))
    server.put(lease, [Payload(kind="latents", arrays={"trajectory": array})])
print(server.endpoint, hashlib.sha256(data).hexdigest(), flush=True)
time.sleep(60)
"""


@pytest.fixture
def holder():
    with subprocess.Popen([sys.executable, "-c", HOLDER], stdout=subprocess.PIPE, text=True) as process:
        process.endpoint, process.digest = process.stdout.readline().split()
        yield process
        process.kill()


def test_large_arrays_arrive_whole(holder):
    with PayloadClient() as client:
        fetched = client.fetch({holder.endpoint: [7, 6]}, 30)
    array = fetched[7][0].arrays["trajectory"]
    assert (array.dtype, array.shape) == ("bfloat16", (64, 1 << 19))
    assert hashlib.sha256(array.data).hexdigest() == holder.digest
    assert set(fetched) == {6, 7}


def test_a_holder_that_is_killed_costs_its_leases_and_no_hang(holder):
    killer = threading.Timer(0.05, holder.kill)
    began = time.monotonic()
    with PayloadClient() as client:
        killer.start()
        fetched = client.fetch({holder.endpoint: list(range(8))}, 60)
        fetched.update(client.fetch({holder.endpoint: list(range(8))}, 60))
        assert time.monotonic() - began < 30
        killer.join()
        assert client.fetch({holder.endpoint: [1]}, 60) == {}
    for (payload,) in fetched.values():
        assert payload.arrays["trajectory"].nbytes == 64 << 20
