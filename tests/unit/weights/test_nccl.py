"""The order of NCCL's transfers, without a GPU: gloo behind a group whose communicator is built before all of them."""

from __future__ import annotations

import ast
import contextlib
import gc
import threading
import time
import weakref
from pathlib import Path
from types import SimpleNamespace

import attrs
import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend

from cosmos_core.errors import TransportError, WeightSyncError
from cosmos_core.rollout.serving.updates import Update, whole_layout
from cosmos_core.transport.directives import WeightTarget
from cosmos_core.weights import process_group, wire
from cosmos_core.weights.digest import digest_of
from cosmos_core.weights.process_group import PUBLISHER, RECEIVER, Pair, ProcessGroupTransport, Sender, rendezvous
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


PAIRS = SimpleNamespace(record_event=lambda: SimpleNamespace(query=lambda: True))


@contextlib.contextmanager
def on_stream(stream):
    before, STREAMS.current = getattr(STREAMS, "current", None), stream
    yield
    STREAMS.current = before


class Eager:
    """gloo behind NCCL's rules: all members build the communicator at once; transfers have no tags, and meet in the
    order in which they are begun."""

    Options = SimpleNamespace

    def __init__(self, store, rank, size, options):
        self.group, self.store, self.rank, self.number = None, store, rank, 0
        self.is_aborted = False

    def eager_connect_single_device(self, device):
        self.group = process_group._gloo(self.store, self.rank, HOST, 20.0)

    def get_error(self):
        return SimpleNamespace(name="SUCCESS")

    def begin(self, transfer, data, peer):
        assert STREAMS.current, "it would wait for what the process computes"
        assert self.group is not None, "it would build a communicator, which nothing interrupts"
        self.number += 1
        return Polled(getattr(self.group, transfer)(data, peer, self.number))

    def send(self, data, peer, tag):
        return self.begin("send", data, peer)

    def recv(self, data, peer, tag):
        return self.begin("recv", data, peer)

    def abort(self):
        self.is_aborted = True


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setattr(process_group.dist, "ProcessGroupNCCL", Eager, raising=False)
    monkeypatch.setattr(process_group, "_gpu", lambda: torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: PAIRS)
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
    groups, make = [], Eager.__init__
    monkeypatch.setattr(process_group, "_LOOK_S", 0.05)
    monkeypatch.setattr(Eager, "__init__", lambda group, *of: groups.append(group) or make(group, *of))
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
    # The publisher hears that the receiver has gone, and no group is left to its destructor.
    deadline = time.monotonic() + 20
    while not all(group.is_aborted for group in groups) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert [group.is_aborted for group in groups] == [True] * 8


def test_what_a_killed_receiver_left_is_given_up_when_it_comes_back(published, monkeypatch):
    publisher, target, loaded = published
    monkeypatch.setattr(process_group, "_LOOK_S", 0.05)
    senders = []
    for name in ("rollout-0", "rollout-1", "rollout-0"):
        receiver = WeightReceiver("nccl", run_id="run", host="here", stall_s=10.0, name=name)
        with receiver.fetch(target, {0: whole_layout(loaded)}, 20.0) as pieces:
            assert [*pieces]
        senders += [each for each in publisher._server._senders.values() if each not in senders]
        # Nothing is told of its end, as of a process that is killed.
        receiver._pairs.clear()
        receiver.close()
    first, other, again = senders
    first._thread.join(20)
    assert [first.is_over, other.is_over, again.is_over] == [True, False, False]


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
    meeting, began = rendezvous(HOST, 5.0), time.monotonic()
    with pytest.raises(TransportError, match="no nccl connection: "):
        ProcessGroupTransport("nccl", HOST, meeting.port, 0.3)
    monkeypatch.setattr(process_group, "IDLE_S", 0.3)
    sender = Sender("nccl", HOST)
    sender._thread.join(5)
    assert sender.is_over
    assert time.monotonic() - began < 10


def test_who_is_lost_before_the_communicator_is_built_is_given_up(monkeypatch):
    monkeypatch.setattr(process_group, "FORM_S", 0.3)
    waits, meeting = threading.Event(), rendezvous(HOST, 5.0)
    monkeypatch.setattr(Eager, "eager_connect_single_device", lambda group, device: waits.wait(60))
    meeting.set(f"here-{RECEIVER}", "")
    with pytest.raises(TransportError, match=r"NCCL's communicator of 2 was not built in 0\.3 s: a member is lost"):
        Pair("nccl", meeting, PUBLISHER, host=HOST, timeout_s=0.2)
    waits.set()


def test_the_stand_in_has_nothing_that_groups_of_torch_lack():
    if dist.is_nccl_available():
        real = {*dir(dist.ProcessGroupNCCL)}
    else:  # what lies beside the compiled module says what a build with NCCL has
        said = ast.parse(Path(torch.__file__).with_name("_C").joinpath("_distributed_c10d.pyi").read_text())
        classes = {each.name: each for each in said.body if isinstance(each, ast.ClassDef)}
        bodies = [*classes["Backend"].body, *classes["ProcessGroupNCCL"].body]
        real = {each.name for each in bodies if isinstance(each, ast.FunctionDef | ast.ClassDef)} | {*dir(Backend)}
    assert {name for name in vars(Eager) if name[0] != "_"} - {"begin"} <= real
