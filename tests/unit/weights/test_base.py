"""Changes of what a replica has, over real sockets: what is sent, what is made of it, and what happens in doubt."""

from __future__ import annotations

import contextlib
import os
import threading

import attrs
import pytest
import torch

from cosmos_core.errors import WeightSyncError
from cosmos_core.protocols import TensorSlice
from cosmos_core.transport import sockets
from cosmos_core.transport.directives import WeightTarget
from cosmos_core.weights import server, wire
from cosmos_core.weights import snapshot as module
from cosmos_core.weights.digest import digest_of, tensor_digests
from cosmos_core.weights.publisher import WeightPublisher
from cosmos_core.weights.receiver import WeightReceiver
from cosmos_core.weights.shards import LocalShard, TensorFacts
from cosmos_core.weights.shared_memory import directories_for_files
from cosmos_core.weights.snapshot import Base

torch.set_num_threads(1)


def first():
    draw = torch.Generator().manual_seed(1)
    return {
        "embed": torch.randn(600, 96, generator=draw).bfloat16(),
        "w": torch.randn(64, 96, generator=draw).bfloat16(),
        "norm": torch.randn(96, generator=draw),
        "codes": torch.randint(0, 256, (48, 96), generator=draw, dtype=torch.uint8),
        "scales": torch.rand(48, 6, generator=draw).to(torch.float8_e4m3fn),
        "count": torch.arange(6),
        "scale": torch.tensor(2.5),
        "empty": torch.zeros(0, 6),
    }


def stepped(tensors, share=0.04):
    """The next version: a share of the elements of each tensor gets one other bit."""
    draw = torch.Generator().manual_seed(2)
    made = {}
    for name, tensor in tensors.items():
        made[name] = tensor.clone()
        is_hit = torch.rand(tensor.numel(), generator=draw) < share
        made[name].view(-1).view(torch.uint8).view(-1, tensor.element_size())[is_hit, 0] ^= 1
    return made


NBYTES = sum(tensor.nbytes for tensor in first().values())


def layout_of(tensors, ranks=1):
    """Rank r of n holds the r-th part of the columns, and all of what has no columns."""
    layout = {}
    for rank in range(ranks):
        held = layout.setdefault(rank, [])
        for name, tensor in tensors.items():
            shape, start = list(tensor.shape), [0] * tensor.dim()
            if tensor.dim() > 1:
                shape[1] //= ranks
                start[1] = rank * shape[1]
            piece = TensorSlice(name=name, start=tuple(start), shape=tuple(shape))
            held.append((piece, str(tensor.dtype).removeprefix("torch.")))
    return layout


def target_of(published, *publishers):
    return WeightTarget(
        version=published.version,
        digest=published.digest,
        sources=tuple(publisher.endpoint for publisher in publishers),
        hosts=("here",) * len(publishers),
    )


def published_by(publishers, version, tensors):
    """All of them publish the same."""
    published, *_ = [publisher.publish(version, tensors, None) for publisher in publishers]
    return published


def load(receiver, target, base, *, like, ranks=1):
    """The tensors that came, and the fetch; what came is in the base then, and taken for right."""
    layout = layout_of(like, ranks)
    loaded = {name: torch.zeros_like(tensor) for name, tensor in like.items()}
    with receiver.fetch(target, layout, 10.0, base=base) as pieces:
        base.begin(target.version, layout)
        for _, piece, data in pieces:
            base.write(piece, data)
            place = tuple(slice(s, s + n) for s, n in zip(piece.start, piece.shape, strict=True))
            loaded[piece.name][place] = data
    base.confirm(target.version, target.digest)
    return loaded, pieces


@pytest.fixture
def sent(monkeypatch):
    """Bytes of slices in each answer that a server has sent."""
    sizes, offer = [], sockets.offer

    def counting(socket, frames, **options):
        if threading.current_thread().name == "weight-server":
            sizes.append(sum(len(frame) for frame in frames[2:]))
        return offer(socket, frames, **options)

    monkeypatch.setattr(sockets, "offer", counting)
    return sizes


@pytest.fixture
def publishers(tmp_path):
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(WeightPublisher("run", directory=tmp_path)) for _ in range(2)]


@pytest.fixture
def base(tmp_path):
    with Base(tmp_path) as made:
        yield made


@pytest.fixture
def receiver():
    with WeightReceiver("zmq", run_id="run", host="here", stall_s=2.0) as made:
        yield made


@pytest.mark.parametrize("ranks", [1, 3])
def test_only_what_changed_is_sent_and_the_result_is_the_same_bit_for_bit(publishers, base, receiver, sent, ranks):
    tensors = first()
    both = sum(tensor.nbytes for tensor in tensors.values() if tensor.dim() < 2) * (ranks - 1)
    for version, share in enumerate((0.04, 0.04, 0.0, 0.002, 1.0, 0.3)):
        published = publishers[0].publish(version, tensors, None)
        sent.clear()
        loaded, pieces = load(receiver, target_of(published, publishers[0]), base, like=tensors, ranks=ranks)
        assert digest_of(loaded) == published.digest == digest_of(tensors)
        assert pieces.num_whole == 0
        assert sum(sent) + pieces.spared == NBYTES + both
        if version in (1, 2):
            assert sum(sent) < 0.08 * NBYTES
        if version in (0, 5):
            assert pieces.spared == 0
        if version == 3:
            assert sum(sent) == 0
        tensors = stepped(tensors, share)


def test_halves_of_two_publishers_are_made_of_one_base(publishers, base, receiver, sent):
    tensors = {"w": first()["w"]}
    for version in (1, 2):
        staged = []
        for rank, publisher in enumerate(publishers):
            half = tensors["w"][:, 48 * rank : 48 * rank + 48]
            shard = LocalShard(tensor=half, start=(0, 48 * rank), shape=(64, 96))
            staged.append(publisher.stage(version, {"w": shard}, None))
        total = {"w": sum(snapshot.digests()["w"] for snapshot in staged) % 2**64}
        published, _ = [p.seal(s, digests=total) for p, s in zip(publishers, staged, strict=True)]
        sent.clear()
        # What a rank wants of a publisher lies in rows of half the length there.
        loaded, pieces = load(receiver, target_of(published, *publishers), base, like=tensors, ranks=3)
        assert digest_of(loaded) == published.digest
        tensors = {"w": stepped(tensors)["w"]}
    assert sum(sent) < 0.1 * tensors["w"].nbytes
    assert sum(sent) + pieces.spared == tensors["w"].nbytes


def test_a_publisher_that_has_the_base_no_more_sends_all(publishers, base, receiver, sent):
    load(receiver, target_of(publishers[0].publish(1, first(), None), publishers[0]), base, like=first())
    second = stepped(first())
    published = publishers[0].publish(2, second, None)
    publishers[0].retain(2)
    sent.clear()
    loaded, pieces = load(receiver, target_of(published, publishers[0]), base, like=second)
    assert digest_of(loaded) == published.digest
    assert (pieces.spared, sum(sent), pieces.num_whole) == (0, NBYTES, 1)


def test_a_base_of_the_same_version_and_another_digest_is_not_used(publishers, base, receiver):
    load(receiver, target_of(publishers[1].publish(1, first(), None), publishers[1]), base, like=first())
    # After a failure, a step may have been done again, with other numbers.
    publishers[0].publish(1, stepped(first(), 0.5), None)
    second = stepped(first())
    published = publishers[0].publish(2, second, None)
    loaded, pieces = load(receiver, target_of(published, publishers[0]), base, like=second)
    assert digest_of(loaded) == published.digest
    assert (pieces.spared, pieces.num_whole) == (0, 1)


def test_tensors_with_another_shape_or_dtype_come_whole(publishers, base, receiver, sent):
    load(receiver, target_of(publishers[0].publish(1, first(), None), publishers[0]), base, like=first())
    changed = {**stepped(first()), "w": torch.ones(96, 64).bfloat16(), "norm": torch.ones(96).half()}
    published = publishers[0].publish(2, changed, None)
    sent.clear()
    layout = layout_of(changed)
    with receiver.fetch(target_of(published, publishers[0]), layout, 10.0, base=base) as pieces:
        got = {piece.name: data for _, piece, data in pieces if data.numel()}
    assert digest_of({**got, "empty": changed["empty"]}) == published.digest
    # One answer is for all of them, and the base is named for all or none.
    assert pieces.spared == 0
    assert sum(sent) == sum(tensor.nbytes for tensor in changed.values())


def test_a_server_whose_versions_differ_in_shape_sends_whole(publishers, base, receiver):
    published = publishers[0].publish(1, {"w": torch.ones(4, 6)}, None)
    second = publishers[0].publish(2, {"w": torch.ones(6, 6)}, None)
    piece = TensorSlice(name="w", start=(0, 0), shape=(4, 6))
    origin = wire.Origin(version=1, digest=published.digest)
    token = publishers[0]._server._published[2].manifest.token
    answer, frames = publishers[0]._server._read(wire.Read(request=1, token=token, pieces=(piece,), base=origin))
    assert (answer.encodings, len(frames[0])) == (("whole",), 96)
    assert second.digest != published.digest


def test_a_wrong_base_gives_wrong_weights_that_are_known_and_mended_by_a_whole_fetch(publishers, base, receiver):
    load(receiver, target_of(publishers[0].publish(1, first(), None), publishers[0]), base, like=first())
    whole = TensorSlice(name="w", start=(0, 0), shape=(64, 96))
    damaged = first()["w"].clone()
    damaged.view(torch.uint8)[5, 7] ^= 16
    base.write(whole, damaged)
    # Of that element itself nothing is sent.
    second = {**stepped(first()), "w": first()["w"]}
    published = publishers[0].publish(2, second, None)
    loaded, pieces = load(receiver, target_of(published, publishers[0]), base, like=second)
    assert pieces.spared > 0
    assert tensor_digests(loaded)["w"] != pieces.digests["w"]
    base.begin(2, layout_of(second))  # what was made is refused, never confirmed
    loaded, pieces = load(receiver, target_of(published, publishers[0]), base, like=second)
    assert pieces.spared == 0
    assert digest_of(loaded) == published.digest


MISFITS = {
    "embed: 7 bytes are no changes of 57,600 elements": ("gaps-1", bytes(7)),
    "embed: a change at element 4,294,967,295 of a slice of 57,600": ("gaps-4", bytes(2) + b"\xff" * 4),
    "embed: 8 bytes are too few for a bitmap of 57,600": ("bitmap", bytes(8)),
}


def test_changes_that_do_not_fit_are_refused_by_name_and_come_from_another(
    publishers, base, receiver, monkeypatch, subtests
):
    def wrong(old, new, itemsize):
        if threading.current_thread() is not faulty or len(new) < 20_000:  # not of embed
            return encode(old, new, itemsize)
        return misfit

    faulty, encode = publishers[0]._server._thread, server.encode
    monkeypatch.setattr(wire, "REQUEST_BYTES", 1 << 12)
    load(receiver, target_of(published_by(publishers, 1, first()), *publishers), base, like=first())
    second = stepped(first())
    published = published_by(publishers, 2, second)
    monkeypatch.setattr(server, "encode", wrong)
    for reason, (encoding, data) in MISFITS.items():
        misfit = encoding, memoryview(data)
        said = f"version 2 cannot be fetched: tcp://.*: {reason}"
        with subtests.test(reason=reason), pytest.raises(WeightSyncError, match=said):
            load(receiver, target_of(published, publishers[0]), base, like=second)
        assert base.origin is None
        # Then all of it comes, from the same.
        load(receiver, target_of(published, publishers[0]), base, like=second)
    third = stepped(second)
    published = published_by(publishers, 3, third)
    loaded, pieces = load(receiver, target_of(published, *publishers), base, like=third)
    assert digest_of(loaded) == published.digest
    assert pieces.spared > 0
    assert any(source.failure for source in (ready.source for ready in pieces._ready))


def test_changes_for_which_nobody_asked_are_refused(publishers, base, receiver, monkeypatch):
    def unasked(self, request):
        answer, frames = read(self, request)
        return attrs.evolve(answer, encodings=("gaps-1",) * len(frames)), frames

    read = server.SliceServer._read
    monkeypatch.setattr(server.SliceServer, "_read", unasked)
    published = publishers[0].publish(1, first(), None)
    with pytest.raises(WeightSyncError, match="codes: changes as 'gaps-1', and no base was named"):
        load(receiver, target_of(published, publishers[0]), base, like=first())
    monkeypatch.setattr(
        server.SliceServer, "_read", lambda self, request: (wire.Slices(request=1, encodings=("whole",)), ())
    )
    with pytest.raises(WeightSyncError, match="an answer to nothing that was asked"):
        load(receiver, target_of(published, publishers[0]), base, like=first())


def test_a_fetch_that_ends_half_way_leaves_no_base(publishers, base, receiver):
    load(receiver, target_of(publishers[0].publish(1, first(), None), publishers[0]), base, like=first())
    published = publishers[0].publish(2, stepped(first()), None)
    assert base.origin.version == 1
    norm = TensorSlice(name="norm", start=(0,), shape=(96,))
    assert base.holds(norm, TensorFacts(shape=(96,), dtype="float32"))
    assert not base.holds(norm, TensorFacts(shape=(96,), dtype="float16"))
    assert not base.holds(norm, TensorFacts(shape=(192,), dtype="float32"))
    with receiver.fetch(target_of(published, publishers[0]), layout_of(first()), 10.0, base=base) as pieces:
        base.begin(2, layout_of(first()))
        next(iter(pieces))
    assert base.origin is None


def test_another_transport_and_mapped_files_send_no_changes(publishers, base):
    for transport in ("gloo", "auto"):
        published = publishers[0].publish(1, first(), None)
        with WeightReceiver(transport, run_id="run", host="here") as receiver:
            load(receiver, target_of(published, publishers[0]), base, like=first())
            second = publishers[0].publish(2, stepped(first()), None)
            loaded, pieces = load(receiver, target_of(second, publishers[0]), base, like=first())
        assert digest_of(loaded) == second.digest
        assert (pieces.spared, pieces.num_whole, pieces.is_asked) == (0, 0, transport == "gloo")


def test_without_room_there_is_no_base_and_the_log_says_so(base, monkeypatch, caplog):
    def full(*_, **__):
        raise WeightSyncError("no room for a weight snapshot")

    monkeypatch.setattr(module, "blank_snapshot", full)
    base.begin(1, layout_of(first()))
    base.write(TensorSlice(name="norm", start=(0,), shape=(96,)), torch.ones(96))
    base.confirm(1, "digest")
    assert base.origin is None
    assert "of weights version 1 no copy is kept, the next one comes whole: no room" in caplog.text


def test_a_base_leaves_no_file_behind():
    def files():
        return {path for folder in directories_for_files() for path in folder.glob(f"cosmos-weights-{os.getpid()}-*")}

    before = files()
    with Base() as base:
        base.begin(1, layout_of(first()))
        base.begin(2, layout_of(first()))
        assert len(files() - before) == 1
        base.begin(3, layout_of({"w": torch.ones(2, 2)}))
        assert len(files() - before) == 1
    assert files() <= before
