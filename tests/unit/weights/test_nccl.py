"""The order of NCCL's transfers, without a GPU: gloo behind a group that builds its communicator in the first one."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
import weakref
from types import SimpleNamespace

import attrs
import pytest
import torch

from cosmos_core.errors import TransportError, WeightSyncError
from cosmos_core.rollout.serving.updates import Update, whole_layout
from cosmos_core.transport.directives import WeightTarget
from cosmos_core.weights import process_group, wire
from cosmos_core.weights.digest import digest_of
from cosmos_core.weights.process_group import PUBLISHER, RECEIVER, Pair, ProcessGroupTransport, Rendezvous, Sender
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


STREAMS = threading.local()
STREAMS.current = None


@contextlib.contextmanager
def on_stream(stream):
    STREAMS.current = stream
    yield
    STREAMS.current = None


class Lazy:
    """gloo behind NCCL's rules: the lower rank of two names their communicator in its first transfer, the other waits
    for the name in its own; and transfers have no tags, so that they meet in the order in which they are begun."""

    Options = SimpleNamespace

    def __init__(self, store, rank, size, options):
        self.group, self.store, self.rank, self.number = None, store, rank, 0

    def get_error(self):
        return SimpleNamespace(name="SUCCESS")

    def begin(self, transfer, data, peer):
        assert STREAMS.current, "it would wait for what the process computes"
        if self.number == 0 and self.rank == 0:
            self.store.set("0:1", "name")
        elif self.number == 0:
            self.store.get("0:1")
        self.group = self.group or process_group._gloo(self.store, self.rank, HOST, 20.0)
        self.number += 1
        return Polled(getattr(self.group, transfer)(data, peer, self.number))

    def send(self, data, peer, tag):
        return self.begin("send", data, peer)

    def recv(self, data, peer, tag):
        return self.begin("recv", data, peer)

    def abort(self):
        pass


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setattr(process_group.dist, "ProcessGroupNCCL", Lazy, raising=False)
    monkeypatch.setattr(process_group, "_gpu", lambda: torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: "the pair's")
    monkeypatch.setattr(torch.cuda, "stream", on_stream)


class Device:
    """Counts the bytes of the rooms that a GPU would hold, as they are made and let go."""

    def __init__(self, monkeypatch):
        self.held = self.peak = 0
        make = Pair.room

        def room(pair, size):
            made = make(pair, size)
            self.count(size)
            weakref.finalize(made.untyped_storage(), self.count, -size)
            return made

        monkeypatch.setattr(Pair, "room", room)

    def count(self, size):
        self.held += size
        self.peak = max(self.peak, self.held)


@pytest.fixture
def device(monkeypatch):
    return Device(monkeypatch)


@pytest.fixture
def published(tmp_path):
    """A publisher with more weights than may be on their way at once, and what to fetch."""
    tensors = {"w": torch.randn(7000, 2000), "norm": torch.randn(1000)}
    with WeightPublisher("run", directory=tmp_path) as publisher:
        digest = publisher.publish(1, tensors, None).digest
        target = WeightTarget(version=1, digest=digest, sources=(publisher.endpoint,), hosts=("here",))
        yield publisher, target, {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}


def fetched(target, update, layout, on_piece=lambda: None):
    receiver = WeightReceiver("nccl", run_id="run", host="here", stall_s=3.0)
    with receiver, receiver.fetch(target, layout, 20.0) as pieces:
        for rank, piece, data in pieces:
            update.write_to(rank, piece, data)
            on_piece()


def test_weights_come_through_a_gpu_that_holds_only_what_is_on_its_way(published, device):
    _, target, loaded = published
    update = Update(1, loaded)
    fetched(target, update, {0: whole_layout(loaded)})
    update.check()
    assert not any(tensor.any() for tensor in loaded.values())
    assert digest_of(loaded) != target.digest
    update.apply()
    assert digest_of(loaded) == target.digest
    assert device.held == 0
    assert wire.REQUEST_BYTES < device.peak <= wire.WINDOW * wire.REQUEST_BYTES < loaded["w"].nbytes


def test_a_pair_goes_on_from_version_to_version_until_one_of_the_two_leaves_it(published, monkeypatch):
    publisher, target, loaded = published
    groups, make = [], Lazy.__init__
    monkeypatch.setattr(Lazy, "__init__", lambda group, *of: groups.append(group) or make(group, *of))
    layout = {0: whole_layout(loaded)}
    with WeightReceiver("nccl", run_id="run", host="here", stall_s=10.0) as receiver:

        def fetch():
            update = Update(1, loaded)
            with receiver.fetch(target, layout, 20.0) as pieces:
                for rank, piece, data in pieces:
                    update.write_to(rank, piece, data)
            update.apply()
            assert digest_of(loaded) == target.digest
            return len(groups)

        assert [fetch(), fetch(), fetch()] == [2, 2, 2]
        # What is still on its way would be taken for the next fetch's.
        with receiver.fetch(target, layout, 20.0) as pieces:
            next(iter(pieces))
        assert fetch() == 4
        # The publisher has given it up meanwhile.
        (sender,) = publisher._server._senders.values()
        sender._why_ended = "it was asked for nothing"
        assert [fetch(), fetch()] == [6, 6]
        # Another publisher takes its place.
        others = attrs.evolve(target, sources=("tcp://127.0.0.1:1",))
        with pytest.raises(WeightSyncError), receiver.fetch(others, layout, 0.2):
            pass
        assert fetch() == 8


def test_a_publisher_that_goes_in_the_middle_leaves_what_is_loaded_and_nothing_on_the_gpu(published, device):
    publisher, target, loaded = published
    update = Update(1, loaded)
    with pytest.raises(WeightSyncError, match="weights version 1 "):
        fetched(target, update, {0: whole_layout(loaded)}, publisher.close)
    with pytest.raises(WeightSyncError, match="not wholly written"):
        update.check()
    assert not any(tensor.any() for tensor in loaded.values())
    gc.collect()
    assert device.held == 0


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
