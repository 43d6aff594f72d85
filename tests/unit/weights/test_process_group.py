import socket
import threading
import time

import pytest
import torch
import torch.distributed as dist

from cosmos_core.errors import TransportError
from cosmos_core.testing.worlds import run_world
from cosmos_core.weights import process_group
from cosmos_core.weights.process_group import (
    PUBLISHER,
    RECEIVER,
    Pair,
    ProcessGroupTransport,
    Sender,
    meet,
    rendezvous,
    tag_of,
)

torch.set_num_threads(1)

HOST = "127.0.0.1"
SIZE = 3_000_000


def make_pair(timeout_s=20.0):
    """The two of a world."""
    rank = dist.get_rank()
    meeting = rendezvous(HOST, timeout_s) if rank == PUBLISHER else None
    ports = [0 if meeting is None else meeting.port]
    dist.broadcast_object_list(ports, PUBLISHER)
    return Pair("gloo", meeting or meet(HOST, ports[0], timeout_s), rank, host=HOST, timeout_s=timeout_s)


def pattern(seed):
    return torch.randint(256, (SIZE,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def pass_two_in_any_order():
    pair = make_pair()
    if dist.get_rank() == PUBLISHER:
        sent = [pattern(1), pattern(2)]
        for work in [pair.send(sent[0], 7), pair.send(sent[1], 3)]:
            pair.finish(work, 20)
        return True
    got = [torch.empty(SIZE, dtype=torch.uint8) for _ in range(2)]
    for work in [pair.receive(got[0], 3), pair.receive(got[1], 7)]:
        pair.finish(work, 20)
    return torch.equal(got[0], pattern(2)) and torch.equal(got[1], pattern(1))


def test_bytes_arrive_as_they_were_under_their_tags():
    assert run_world(2, pass_two_in_any_order) == [True, True]


def wait_for_nobody():
    pair = make_pair()
    if dist.get_rank() == PUBLISHER:
        dist.barrier()
        with pytest.raises(TransportError, match="over gloo failed: Connection closed by peer"):
            pair.finish(pair.send(pattern(1), 1), 20)
        return 0.0
    works = [pair.receive(torch.empty(SIZE, dtype=torch.uint8), tag) for tag in (5, 6)]
    began = time.monotonic()
    with pytest.raises(TransportError, match="over gloo failed: Timed out waiting 300ms"):
        pair.finish(works[0], 0.3)
    pair.drop(works)
    took = time.monotonic() - began
    dist.barrier()
    return took


def test_who_waits_in_vain_leaves_at_once_and_the_other_hears_of_it():
    assert max(run_world(2, wait_for_nobody)) < 5


def test_who_is_not_met_is_given_up():
    meeting = rendezvous(HOST, 0.3)
    began = time.monotonic()
    with pytest.raises(TransportError, match="no gloo connection: "):
        Pair("gloo", meeting, PUBLISHER, host=HOST, timeout_s=0.3)
    port = meeting.port
    del meeting
    with pytest.raises(TransportError, match=rf"127.0.0.1:{port} cannot be met"):
        ProcessGroupTransport("gloo", HOST, port, 0.3)
    assert time.monotonic() - began < 10
    with pytest.raises(TransportError, match=r"nobody can be met at 192\.0\.2\.1"):
        rendezvous("192.0.2.1", 0.3)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_nccl_without_a_gpu_is_refused():
    meeting = rendezvous(HOST, 5)
    with pytest.raises(TransportError, match=r"nccl needs a CUDA device .* set sync.transport to 'gloo' or 'auto'"):
        Pair("nccl", meeting, RECEIVER, host=HOST, timeout_s=5)


def ended(sender):
    sender._thread.join(5)
    return sender.is_over


def test_a_sender_ends_when_its_receiver_leaves_or_never_comes_or_asks_for_nothing(monkeypatch):
    sender = Sender("gloo", HOST)
    transport = ProcessGroupTransport("gloo", HOST, sender.port, 5)
    data = bytes(range(256)) * 1000
    transport.expect(1, [len(data), 0, 3])
    sender.send(1, [memoryview(bytearray(data)), memoryview(b""), memoryview(bytearray(b"abc"))])
    assert [bytes(part.numpy()) for part in transport.take(1, [])] == [data, b"", b"abc"]
    sender.close()
    transport.close()
    assert ended(sender)

    # A receiver connects with its other publishers first.
    with monkeypatch.context() as patch:
        patch.setattr(process_group, "FORM_S", 1.0)
        sender = Sender("gloo", HOST)
        sender._thread.join(1.5)
        transport = ProcessGroupTransport("gloo", HOST, sender.port, 5)
        sender.close()
        transport.close()
        assert ended(sender)
        assert not sender._why_ended
        # Whoever never comes is left once somebody says so, or after a while.
        sender = Sender("gloo", HOST)
        sender.close()
        assert ended(sender)

    monkeypatch.setattr(process_group, "IDLE_S", 0.2)
    assert ended(Sender("gloo", HOST))
    sender = Sender("gloo", HOST)
    transport = ProcessGroupTransport("gloo", HOST, sender.port, 5)
    assert ended(sender)
    with pytest.raises(TransportError, match=r"it was asked for nothing over gloo for 0\.2 s"):
        sender.send(1, [memoryview(bytearray(SIZE))])
    transport.expect(1, [SIZE])
    with pytest.raises(TransportError, match="over gloo failed"):
        transport.take(1, [])
    transport.close()


def test_a_receiver_that_takes_nothing_is_given_up(monkeypatch, caplog):
    monkeypatch.setattr(process_group, "SEND_S", 0.3)
    sender = Sender("gloo", HOST)
    transport = ProcessGroupTransport("gloo", HOST, sender.port, 5)
    sender.send(1, [memoryview(bytearray(64 << 20))])
    assert ended(sender)
    assert "a receiver of weights over gloo was given up: a transfer over gloo failed" in caplog.text
    transport.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "weights-gloo"]


def test_a_gpu_without_room_ends_the_sender_with_a_word(monkeypatch, caplog):
    def full(self, data):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    sender = Sender("gloo", HOST)
    transport = ProcessGroupTransport("gloo", HOST, sender.port, 5)
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "to", full)
        sender.send(1, [memoryview(bytearray(b"abc"))])
        assert ended(sender)
    assert "was given up: 3 bytes cannot be put on cpu: CUDA out of memory" in caplog.text
    with pytest.raises(TransportError, match="the connection over gloo was given up: 3 bytes cannot be put on cpu"):
        sender.send(2, [])
    transport.close()


def test_a_receiver_without_room_fails_when_it_takes(monkeypatch):
    sender = Sender("gloo", HOST)
    transport = ProcessGroupTransport("gloo", HOST, sender.port, 5)
    transport._pair.device = torch.device("cuda", 99)
    monkeypatch.setattr(torch, "empty", lambda *size, **of: torch.zeros(-1))
    transport.expect(1, [SIZE])
    with pytest.raises(TransportError, match=r"no room for 3,000,000 bytes on cuda:99: "):
        transport.take(1, [])
    sender.close()
    transport.close()
    assert ended(sender)


def test_tags_of_different_slices_differ_and_fit():
    tags = [tag_of(request, index) for request in range(1, 50) for index in range(256)]
    assert len(set(tags)) == len(tags)
    assert 0 <= tag_of(10**9, 255) < 2**31


def test_a_publisher_that_is_stopped_before_it_answers_is_given_up():
    before = set(threading.enumerate())
    with socket.create_server((HOST, 0)) as silent:
        began = time.monotonic()
        with pytest.raises(TransportError, match=r"cannot be met: it does not answer within 1\.2 s"):
            meet(HOST, silent.getsockname()[1], 0.2)
        assert time.monotonic() - began < 10
    for thread in set(threading.enumerate()) - before:
        thread.join(20)
        assert not thread.is_alive()
