import contextlib
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import PrefixStore, TCPStore

from cosmos_core.models.parallel.channel import SMALL_BYTES
from cosmos_core.policy.processes.backend import connect
from cosmos_core.policy.processes.group import GradientGroup, GradientGroupError, solo
from cosmos_core.policy.processes.rendezvous import form_group
from cosmos_core.weights.process_group import aside

CPU = torch.device("cpu")


def members(store, size, work, *, generation=1, interrupted=lambda: False, timeout_s=10.0):
    """Run `work(group)` as each member on a thread of its own."""

    def member(rank):
        group = form_group(
            generation=generation,
            rank=rank,
            size=size,
            store=store.endpoint,
            address="127.0.0.1",
            device=CPU,
            interrupted=interrupted,
            timeout_s=timeout_s,
        )
        return work(group)

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(member, range(size)))


def test_sum_and_copy(store):
    def work(group):
        tensor = torch.full((3,), float(group.rank + 1))
        group.sum(tensor)
        copied = torch.full((2, 2), float(group.rank))
        group.copy([copied], 1)
        return tensor.tolist(), copied.flatten().tolist()

    assert members(store, 3, work) == [([6.0] * 3, [1.0] * 4)] * 3


def test_what_waits_elsewhere_is_copied_through_the_groups_device(store):
    """Its backend takes tensors of no other."""

    class Elsewhere:
        def __init__(self, value):
            self.value = torch.tensor([value])

        def to(self, device):
            assert device == CPU
            return self.value.clone()

        def copy_(self, other):
            self.value = other.clone()

    def work(group):
        waiting = Elsewhere(float(group.rank))
        group.copy([waiting], 1)
        return waiting.value.item()

    assert members(store, 2, work) == [1.0, 1.0]


def test_exchange_of_any_size(store):
    sizes = [0, 10, SMALL_BYTES, SMALL_BYTES + 1, 5000]
    messages = [[bytes([rank]) * (size * (rank + 1) // 2) for size in sizes] for rank in range(2)]
    answers = members(store, 2, lambda group: [group.exchange(each) for each in messages[group.rank]])
    assert answers == [[list(each) for each in zip(*messages, strict=True)]] * 2


def test_generations_share_a_store(store):
    for generation in (1, 2, 5):
        sums = members(store, 2, lambda group: group.exchange(b"x"), generation=generation)
        assert sums == [[b"x", b"x"]] * 2


def test_a_group_of_one_needs_no_network():
    group = solo()
    tensor = torch.ones(2)
    group.sum(tensor)
    group.copy([tensor], 0)
    assert tensor.tolist() == [1.0, 1.0]
    assert group.exchange(b"me") == [b"me"]


def test_a_collective_that_a_member_never_joins_can_be_interrupted(store):
    stop = threading.Event()
    is_over = threading.Event()

    def work(group):
        if group.rank == 1:
            is_over.wait(20)
            return
        threading.Timer(0.3, stop.set).start()
        tensor = torch.ones(4)
        try:
            with pytest.raises(GradientGroupError, match="interrupted in a collective"):
                group.sum(tensor)
            # A broken group never pretends to be one of a single member.
            with pytest.raises(GradientGroupError, match="closed"):
                group.sum(tensor)
        finally:
            is_over.set()

    members(store, 2, work, interrupted=stop.is_set)


def test_collectives_may_take_longer_than_forming_the_group(store):
    def work(group):
        time.sleep(1.0 * group.rank)
        tensor = torch.ones(1)
        group.sum(tensor)
        return tensor.tolist()

    assert members(store, 2, work, timeout_s=0.5) == [[2.0]] * 2


def test_a_group_of_accelerators_is_aborted_when_it_is_given_up_or_left(streams):
    aborted = []
    backend = SimpleNamespace(
        allreduce=lambda _: SimpleNamespace(is_completed=lambda: False), abort=lambda: aborted.append(True)
    )
    group = GradientGroup(
        generation=1, rank=0, size=2, backend=backend, device=torch.device("cuda"), interrupted=lambda: True
    )
    with pytest.raises(GradientGroupError, match="interrupted in a collective"):
        group.sum(torch.ones(1))
    assert aborted == [True]
    group.close()
    assert aborted == [True]
    GradientGroup(
        generation=2, rank=0, size=2, backend=backend, device=torch.device("cuda"), interrupted=lambda: True
    ).close()
    assert aborted == [True, True]


@pytest.fixture
def streams(monkeypatch):
    """The streams that are made; what they are asked for is done once a test has set `has_ended`."""
    made = []

    def make(device, priority=0):
        event = SimpleNamespace(query=lambda: stream.has_ended())  # noqa: PLW0108 - a test sets it
        stream = SimpleNamespace(record_event=lambda: event, has_ended=lambda: True, priority=priority)
        made.append(stream)
        return stream

    monkeypatch.setattr(torch.cuda, "Stream", make)
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    aside.cache_clear()
    yield made
    aside.cache_clear()


def test_what_the_watchdog_ended_is_not_taken_for_a_sum(streams):
    """A work of NCCL looks complete once an error is seen; the group tells of it later, before the kernel ends."""
    aborted, looks = [], []

    def has_ended():
        looks.append(True)
        return len(looks) > 3

    backend = SimpleNamespace(
        allreduce=lambda _: SimpleNamespace(is_completed=lambda: True, wait=lambda: True),
        get_error=lambda: SimpleNamespace(name="COMM_ERROR" if len(looks) > 2 else "SUCCESS"),
        abort=lambda: aborted.append(True),
    )
    cuda = torch.device("cuda")
    aside(cuda).has_ended = has_ended
    group = GradientGroup(generation=4, rank=0, size=2, backend=backend, device=cuda, interrupted=lambda: False)
    with pytest.raises(GradientGroupError, match=r"generation 4: .* NCCL has given the group up: COMM_ERROR"):
        group.sum(torch.ones(1))
    assert aborted == [True]
    assert [stream.priority for stream in streams] == [-1], "all sums wait on one, of a pool that few take from"


@pytest.mark.parametrize("own", [None, "2", "1"])
def test_groups_of_nccl_are_built_once_all_are_there_and_spare_their_members(monkeypatch, caplog, own):
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", own or "")
    if own is None:
        monkeypatch.delenv("TORCH_NCCL_ASYNC_ERROR_HANDLING")
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    class Made:
        Options = SimpleNamespace

        def __init__(self, _store, rank, size, options):
            self.made = (rank, size, options._timeout.total_seconds(), os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"])
            self.built = []

        def eager_connect_single_device(self, device):
            self.built.append(device)

    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", Made, raising=False)
    cuda = {"size": 2, "address": "127.0.0.1", "device": torch.device("cuda")}
    with pytest.raises(RuntimeError, match=r"here-1|timeout"):
        connect(PrefixStore("alone", store), rank=0, timeout_s=0.2, **cuda)
    with ThreadPoolExecutor(2) as pool:
        # A client is for one process: while it waits, it does nothing else.
        clients = [store, TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False)]
        both = [
            pool.submit(connect, PrefixStore("both", clients[rank]), rank=rank, timeout_s=20.0, **cuda)
            for rank in range(2)
        ]
        # CleanUpOnly: the watchdog ends no process.
        assert [each.result().made for each in both] == [(rank, 2, 1800.0, "2") for rank in range(2)]
        assert [each.result().built for each in both] == [[cuda["device"]]] * 2, "nothing interrupts the first sum"
    assert os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING") == own, "other groups and children have the user's"
    assert ("TORCH_NCCL_ASYNC_ERROR_HANDLING=1 would end this process" in caplog.text) == (own == "1")
