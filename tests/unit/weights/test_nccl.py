"""The order of NCCL's transfers, without a GPU: gloo behind a group that builds its communicator in the first one."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from cosmos_core.errors import TransportError
from cosmos_core.protocols import TensorSlice
from cosmos_core.transport.directives import WeightTarget
from cosmos_core.weights import process_group
from cosmos_core.weights.digest import digest_of
from cosmos_core.weights.process_group import PUBLISHER, RECEIVER, ProcessGroupTransport, Rendezvous, Sender
from cosmos_core.weights.publisher import WeightPublisher
from cosmos_core.weights.receiver import WeightReceiver

torch.set_num_threads(1)

HOST = "127.0.0.1"


class Polled:
    """A transfer that can be polled, as NCCL's; gloo's can only be waited for."""

    def __init__(self, work):
        self.failure = None
        self.thread = threading.Thread(target=self.run, args=(work,))
        self.thread.start()

    def run(self, work):
        try:
            work.wait()
        except RuntimeError as error:
            self.failure = error

    def is_completed(self):
        return not self.thread.is_alive()

    def wait(self):
        self.thread.join()
        if self.failure is not None:
            raise self.failure


class Lazy:
    """gloo behind NCCL's rules: the lower rank of two names their communicator in its first transfer, the other waits
    for the name in its own; and transfers have no tags, so that they meet in the order in which they are begun."""

    Options = staticmethod(lambda: None)

    def __init__(self, store, rank, size, options):
        self.group = process_group._gloo(store, rank, HOST, 20.0)
        self.store, self.rank, self.number = store, rank, 0

    def begin(self, transfer, data, peer):
        if self.number == 0 and self.rank == 0:
            self.store.set("0:1", "name")
        elif self.number == 0:
            self.store.get("0:1")
        self.number += 1
        return Polled(transfer(data, peer, self.number))

    def send(self, data, peer, tag):
        return self.begin(self.group.send, data, peer)

    def recv(self, data, peer, tag):
        return self.begin(self.group.recv, data, peer)

    def abort(self):
        pass


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setattr(process_group.dist, "ProcessGroupNCCL", Lazy, raising=False)
    monkeypatch.setattr(process_group, "_gpu", lambda: torch.device("cpu"))


def test_the_first_transfer_is_one_that_both_begin(tmp_path):
    tensors = {"w": torch.randn(3000, 1000), "norm": torch.randn(1000)}
    layout = {
        0: [(TensorSlice(name=n, start=(0,) * t.dim(), shape=tuple(t.shape)), "float32") for n, t in tensors.items()]
    }
    loaded = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    with (
        WeightPublisher("run", directory=tmp_path) as publisher,
        WeightReceiver("nccl", run_id="run", host="here", stall_s=3.0) as receiver,
    ):
        published = publisher.publish(1, tensors, None)
        target = WeightTarget(version=1, digest=published.digest, sources=(publisher.endpoint,), hosts=("here",))
        with receiver.fetch(target, layout, 20.0) as pieces:
            for _, piece, data in pieces:
                loaded[piece.name][tuple(slice(s, s + n) for s, n in zip(piece.start, piece.shape, strict=True))] = data
    assert digest_of(loaded) == published.digest


def test_nobody_builds_a_communicator_alone(monkeypatch):
    def never(*of):
        raise AssertionError("it would wait for the other one without a limit")

    monkeypatch.setattr(process_group.dist.ProcessGroupNCCL, "__init__", never)
    meeting, began = Rendezvous(HOST, 5.0), time.monotonic()
    with pytest.raises(TransportError, match="no nccl connection: "):
        ProcessGroupTransport("nccl", HOST, meeting.port, 0.3)
    monkeypatch.setattr(process_group, "FORM_S", 0.3)
    sender = Sender("nccl", HOST)
    sender._thread.join(5)
    assert sender.is_over
    assert time.monotonic() - began < 10


def test_the_publisher_is_the_one_that_names_the_communicator():
    assert PUBLISHER < RECEIVER
