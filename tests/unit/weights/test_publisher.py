import os
import time
from pathlib import Path

import pytest
import torch
import zmq

from cosmos_core.errors import TransportError, WeightSyncError
from cosmos_core.protocols import TensorSlice
from cosmos_core.transport import sockets
from cosmos_core.weights import slices, wire
from cosmos_core.weights.digest import digest_of
from cosmos_core.weights.publisher import WeightPublisher
from cosmos_core.weights.shared_memory import map_shared
from cosmos_core.weights.snapshot import view

torch.set_num_threads(1)


@pytest.fixture
def publisher(tmp_path):
    with WeightPublisher("run", directory=tmp_path) as publisher:
        yield publisher
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def ask(publisher):
    context = zmq.Context()
    socket = sockets.dealer(context, publisher.endpoint, b"asker", sockets.BULK, queued=True)

    def ask(*requests):
        for request in requests:
            socket.send(request if isinstance(request, bytes) else wire.CODEC.encode(request))
        assert socket.poll(5000)
        head, *frames = socket.recv_multipart()
        return wire.CODEC.decode(head), frames

    yield ask
    context.destroy(linger=0)


TENSORS = {"a": torch.arange(12.0).view(3, 4), "b": torch.ones(2)}


def test_publishing_reports_what_was_cast(publisher):
    published = publisher.publish(4, TENSORS, torch.bfloat16)
    assert published.version == 4
    assert published.nbytes == 28
    assert published.digest == digest_of({name: tensor.bfloat16() for name, tensor in TENSORS.items()})


def test_training_may_go_on_between_stage_and_seal(publisher):
    tensors = {name: tensor.clone() for name, tensor in TENSORS.items()}
    snapshot = publisher.stage(1, tensors, None)
    tensors["a"].add_(1)
    assert publisher.held == ()
    discarded = publisher.stage(2, tensors, None)
    assert Path(discarded.file.path).exists()
    publisher.discard(discarded)
    assert not Path(discarded.file.path).exists()
    assert publisher.seal(snapshot).digest == digest_of(TENSORS)
    assert publisher.held == (1,)


def test_old_versions_are_dropped_and_unlinked(publisher, tmp_path):
    for version in range(4):
        publisher.publish(version, TENSORS, None)
    publisher.retain(2)
    assert publisher.held == (2, 3)
    assert len(list(tmp_path.iterdir())) == 3
    publisher.publish(3, TENSORS, None)
    assert len(list(tmp_path.iterdir())) == 2


def nodes(folder):
    return {path.stat().st_ino for path in folder.iterdir()}


def test_the_file_of_a_dropped_version_is_the_next_ones(publisher, ask, tmp_path):
    publisher.publish(1, TENSORS, None)
    (node,) = nodes(tmp_path)
    publisher.retain(2)
    published = publisher.publish(2, {name: tensor + 1 for name, tensor in TENSORS.items()}, None)
    assert nodes(tmp_path) == {node}
    answer, _ = ask(wire.Describe(request=1, run_id="run", version=2))
    mapped = map_shared(answer.manifest.path, token=answer.manifest.token, size=answer.manifest.file_bytes)
    found = {entry.name: view(mapped, entry) for entry in answer.manifest.entries}
    assert digest_of(found) == published.digest == digest_of({name: tensor + 1 for name, tensor in TENSORS.items()})


def test_a_file_that_somebody_unlinked_is_replaced(publisher, tmp_path):
    publisher.publish(1, TENSORS, None)
    (path,) = tmp_path.iterdir()
    publisher.publish(2, TENSORS, None)
    publisher.retain(2)
    path.unlink()
    assert publisher.publish(3, TENSORS, None).digest == digest_of(TENSORS)
    assert publisher.held == (2, 3)
    assert len(list(tmp_path.iterdir())) == 2


def test_a_file_that_is_read_is_not_written_over(publisher, ask, tmp_path):
    publisher.publish(1, TENSORS, None)
    (node,) = nodes(tmp_path)
    answer, _ = ask(wire.Describe(request=1, run_id="run", version=1))
    mapped = map_shared(answer.manifest.path, token=answer.manifest.token, size=answer.manifest.file_bytes)
    publisher.retain(2)
    publisher.publish(2, {name: tensor + 1 for name, tensor in TENSORS.items()}, None)
    assert node not in nodes(tmp_path)
    assert digest_of({entry.name: view(mapped, entry) for entry in answer.manifest.entries}) == digest_of(TENSORS)


def test_a_file_is_not_written_over_before_all_of_it_is_sent(publisher, ask, tmp_path):
    tensors, piece = {"w": torch.ones(1 << 18)}, slices.whole("w", (1 << 18,))  # too much for sockets to copy
    publisher.publish(1, tensors, None)
    (node,) = nodes(tmp_path)
    snapshot = publisher._server._published[1].snapshot
    assert ask(wire.Read(request=2, token=snapshot.token, pieces=(piece,)))[1]
    until = time.monotonic() + 5
    while snapshot.file._lent() is not None and time.monotonic() < until:
        time.sleep(0.01)
    publisher.retain(2)
    publisher.publish(2, tensors, None)
    assert nodes(tmp_path) == {node}
    waits_for_a_socket = publisher._server._published[2].snapshot.read(piece)
    publisher.retain(3)
    publisher.publish(3, {"w": torch.zeros(1 << 18)}, None)
    assert node not in nodes(tmp_path)
    assert digest_of({"w": torch.frombuffer(waits_for_a_socket, dtype=torch.float32)}) == digest_of(tensors)


def test_another_size_takes_another_file(publisher, tmp_path):
    publisher.publish(1, TENSORS, None)
    (path,) = tmp_path.iterdir()
    publisher.retain(2)
    with path.open("rb") as file:
        publisher.publish(2, {**TENSORS, "c": torch.ones(100)}, None)
        assert os.fstat(file.fileno()).st_ino not in nodes(tmp_path)
    assert len(nodes(tmp_path)) == 1


def test_a_manifest_and_slices_are_served(publisher, ask):
    published = publisher.publish(2, TENSORS, None)
    answer, _ = ask(wire.Describe(request=7, run_id="run", version=2))
    assert isinstance(answer, wire.Described)
    assert answer.request == 7
    assert answer.manifest.digest == published.digest
    pieces = (
        TensorSlice(name="a", start=(1, 1), shape=(2, 2)),
        TensorSlice(name="b", start=(0,), shape=(2,)),
    )
    answer, frames = ask(wire.Read(request=8, token=answer.manifest.token, pieces=pieces))
    assert answer == wire.Slices(request=8)
    assert torch.frombuffer(bytearray(frames[0]), dtype=torch.float32).tolist() == [5, 6, 9, 10]
    assert torch.frombuffer(bytearray(frames[1]), dtype=torch.float32).tolist() == [1, 1]


def test_what_cannot_be_answered_is_said(publisher, ask, monkeypatch):
    publisher.publish(2, TENSORS, None)
    manifest = ask(wire.Describe(request=1, run_id="run", version=2))[0].manifest
    piece = TensorSlice(name="a", start=(0, 0), shape=(3, 4))
    outside = TensorSlice(name="a", start=(0, 1), shape=(3, 4))
    answer, _ = ask(wire.Describe(request=2, run_id="other", version=2))
    assert answer == wire.Denied(request=2, reason="it serves the run 'run'")
    assert ask(wire.Describe(request=3, run_id="run", version=1))[0] == wire.Gone(request=3, held=(2,))
    assert ask(wire.Read(request=4, token="?", pieces=(piece,)))[0] == wire.Gone(request=4, held=(2,))
    answer, _ = ask(wire.Read(request=5, token=manifest.token, pieces=(outside,)))
    assert "does not hold" in answer.reason
    answer, _ = ask(wire.Read(request=6, token=manifest.token, pieces=(piece,) * 300))
    assert "300 slices of 14,400 bytes are more than one answer may hold" in answer.reason
    monkeypatch.setattr(wire, "ANSWER_BYTES", 40)
    assert "48 bytes" in ask(wire.Read(request=7, token=manifest.token, pieces=(piece,)))[0].reason


def test_garbage_is_dropped_and_the_server_lives(publisher, ask):
    publisher.publish(2, TENSORS, None)
    answer, _ = ask(b"garbage", b"", wire.Describe(request=3, run_id="run", version=2))
    assert answer.request == 3


def test_an_address_that_is_not_this_machines_is_refused():
    with pytest.raises(TransportError, match=r"cannot listen on tcp://192.0.2.1"):
        WeightPublisher("run", "192.0.2.1")


def test_a_version_that_nobody_could_fetch_is_not_published(tmp_path):
    publisher = WeightPublisher("run", directory=tmp_path)
    publisher._server.close()
    with pytest.raises(WeightSyncError, match=r"weight server tcp://.* is not running"):
        publisher.publish(1, TENSORS, None)
    publisher.close()
