"""Processes that do not read for a while, at connections whose other end is gone."""

from __future__ import annotations

import subprocess
import sys

READER = """
import os, sys, time
import attrs, zmq
from cosmos_core.transport.sockets import CONTROL, address_of, dealer, offer, router

few = attrs.evolve(CONTROL, queue=10)
does_listen = sys.argv[1] == "router"
reads, writes = os.pipe()
if os.fork() == 0:  # who sends more than is read, and ends
    if does_listen:
        socket, whom = dealer(zmq.Context(), os.read(reads, 99).decode(), b"x", queued=True), []
    else:
        socket = router(zmq.Context(), "127.0.0.1", 0)
        os.write(writes, address_of(socket).encode())
        whom = socket.recv_multipart()[:1]
    for _ in range(5000):
        offer(socket, [*whom, bytes(10_000)]) or time.sleep(0.0002)
    os._exit(0)
if does_listen:
    socket = router(zmq.Context(), "127.0.0.1", 0, few)
    os.write(writes, address_of(socket).encode())
else:
    socket = dealer(zmq.Context(), os.read(reads, 99).decode(), b"x", few, queued=True)
    offer(socket, [b"hello"])
os.wait()
offer(socket, [b"x", b"is nobody there?"] if does_listen else [b"is nobody there?"])  # it resets the connection
time.sleep(6)  # libzmq's next ping, after 5 s, would end the process
count = 0
while socket.poll(200):
    socket.recv_multipart()
    count += 1
print("read", count > 10)
os._exit(0)
"""


def test_who_has_not_read_outlives_whoever_wrote():
    readers = [
        subprocess.Popen(
            [sys.executable, "-c", READER, kind], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for kind in ("dealer", "router")
    ]
    said = [reader.communicate(timeout=60) for reader in readers]
    assert said == [("read True\n", "")] * 2
