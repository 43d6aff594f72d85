import contextlib
import itertools
import threading
import time
import weakref

import attrs
import pytest
import torch
import zmq

from cosmos_core.errors import TransportError, WeightSyncError
from cosmos_core.protocols import TensorSlice
from cosmos_core.transport import sockets
from cosmos_core.transport.directives import WeightTarget
from cosmos_core.weights import planner, process_group, server, wire
from cosmos_core.weights import snapshot as snapshots
from cosmos_core.weights.digest import add_digests, digest_of, tensor_digests
from cosmos_core.weights.fetch import Source
from cosmos_core.weights.publisher import WeightPublisher
from cosmos_core.weights.receiver import WeightReceiver
from cosmos_core.weights.shards import LocalShard

torch.set_num_threads(1)

TENSORS = {"embed": torch.randn(4000, 96), "w": torch.randn(64, 96), "norm": torch.randn(96)}
NBYTES = sum(tensor.numel() * 4 for tensor in TENSORS.values())


def layout_of(tensors, ranks=1):
    """Rank r of n holds the r-th part of the columns; what has one dim is held by every rank."""
    layout = {}
    for rank in range(ranks):
        held = layout.setdefault(rank, [])
        for name, tensor in tensors.items():
            shape = list(tensor.shape)
            start = [0] * len(shape)
            if len(shape) > 1:
                shape[1] //= ranks
                start[1] = rank * shape[1]
            piece = TensorSlice(name=name, start=tuple(start), shape=tuple(shape))
            held.append((piece, str(tensor.dtype).removeprefix("torch.")))
    return layout


def target_of(published, *publishers, hosts=None):
    return WeightTarget(
        version=published.version,
        digest=published.digest,
        sources=tuple(getattr(p, "endpoint", p) for p in publishers),
        hosts=tuple(hosts or ["here"] * len(publishers)),
    )


def load(pieces, tensors=None):
    """Assemble whole tensors; NaN marks what has not come."""
    loaded = {name: torch.full_like(tensor, torch.nan) for name, tensor in (tensors or TENSORS).items()}
    for _, piece, data in pieces:
        place = tuple(slice(s, s + n) for s, n in zip(piece.start, piece.shape, strict=True))
        loaded[piece.name][place] = data
    return loaded


@pytest.fixture
def publishers(tmp_path):
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(WeightPublisher("run", directory=tmp_path)) for _ in range(2)]


@pytest.fixture
def receiver():
    with contextlib.ExitStack() as stack:

        def make(transport="auto", stall_s=5.0, run_id="run", rack=""):
            made = WeightReceiver(transport, run_id=run_id, host="here", stall_s=stall_s, rack=rack)
            return stack.enter_context(made)

        yield make


@pytest.fixture
def silent():
    """A publisher that takes requests and never answers."""
    context = zmq.Context()
    socket = sockets.router(context, "127.0.0.1", 0, sockets.BULK)
    yield sockets.address_of(socket)
    context.destroy(linger=0)


def test_every_rank_gets_its_slices(publishers, receiver, subtests):
    published = publishers[0].publish(5, TENSORS, None)
    target = target_of(published, publishers[0])
    for transport, ranks in itertools.product(["auto", "shared-memory", "zmq", "gloo"], [1, 3]):
        with subtests.test(transport=transport, ranks=ranks):
            with receiver(transport).fetch(target, layout_of(TENSORS, ranks), 10) as pieces:
                got = list(pieces)
            assert {rank for rank, _, _ in got} == set(range(ranks))
            assert digest_of(load(got)) == published.digest
            assert sum(data.nbytes for _, _, data in got) == NBYTES + 4 * 96 * (ranks - 1)
    # What is mapped is a view, not a copy, and outlives its publisher's copy.
    with receiver().fetch(target, layout_of(TENSORS), 10) as pieces:
        mapped = {piece.name: data for _, piece, data in pieces}
    publishers[0].retain(6)
    assert mapped["w"].untyped_storage().nbytes() == TENSORS["w"].nbytes
    assert digest_of(mapped) == published.digest


def test_ranks_that_fetch_for_themselves_share_the_work_as_one_that_fetches_for_all(publishers, receiver):
    published, _ = [publisher.publish(5, TENSORS, None) for publisher in publishers]
    target, layout = target_of(published, *publishers), layout_of(TENSORS, 3)

    def fetched(ranks):
        with receiver("zmq").fetch(target, layout, 10, ranks=ranks) as pieces:
            return {(rank, piece): data.clone() for rank, piece, data in pieces}

    together = fetched(None)
    for rank in range(3):
        alone = fetched([rank])
        assert alone.keys() == {each for each in together if each[0] == rank}
        assert all(torch.equal(data, together[each]) for each, data in alone.items())


def test_a_fetch_is_planned_once_however_many_sources_answer(tmp_path, receiver, monkeypatch, subtests):
    plans, maps, original, made = [], [], wire.Manifest.shard_map, planner.Plan.__init__
    monkeypatch.setattr(wire.Manifest, "shard_map", lambda self: maps.append(self) or original(self))
    monkeypatch.setattr(planner.Plan, "__init__", lambda self, *members: plans.append(self) or made(self, *members))
    with contextlib.ExitStack() as stack:
        publishers = [stack.enter_context(WeightPublisher("run", directory=tmp_path)) for _ in range(5)]
        published, *_ = [publisher.publish(5, TENSORS, None) for publisher in publishers]
        for transport in ("auto", "zmq"):
            plans.clear()
            maps.clear()
            with (
                subtests.test(transport=transport),
                receiver(transport).fetch(target_of(published, *publishers), layout_of(TENSORS), 10) as pieces,
            ):
                assert digest_of(load(pieces)) == published.digest
                assert len(pieces._ready) == 5
                assert (len(plans), len(maps)) == (1, 5)


def test_several_publishers_share_the_load(publishers, receiver, monkeypatch):
    monkeypatch.setattr(wire, "SLICE_BYTES", 1 << 16)
    served = dict.fromkeys(publishers, 0)
    published, _ = [publisher.publish(5, TENSORS, None) for publisher in publishers]
    original = snapshots.Snapshot.read

    def counting(self, piece):
        data = original(self, piece)
        owner = next(p for p in publishers if any(q.snapshot is self for q in p._server._published.values()))
        served[owner] += data.nbytes
        return data

    monkeypatch.setattr(snapshots.Snapshot, "read", counting)
    with receiver("zmq").fetch(target_of(published, *publishers), layout_of(TENSORS), 10) as pieces:
        assert digest_of(load(pieces)) == published.digest
    assert sum(served.values()) == NBYTES
    assert abs(served[publishers[0]] - served[publishers[1]]) <= 1 << 16


def test_publishers_that_hold_halves_make_a_whole(publishers, receiver):
    tensors = {"w": TENSORS["w"]}
    staged = []
    for rank, publisher in enumerate(publishers):
        half = tensors["w"][:, 48 * rank : 48 * rank + 48]
        shard = LocalShard(tensor=half, start=(0, 48 * rank), shape=(64, 96))
        staged.append(publisher.stage(1, {"w": shard}, None))
    total = add_digests(snapshot.digests() for snapshot in staged)
    published, _ = [p.seal(s, digests=total) for p, s in zip(publishers, staged, strict=True)]
    assert published.digest == digest_of(tensors)
    for transport in ("zmq", "gloo", "auto"):
        with receiver(transport).fetch(target_of(published, *publishers), layout_of(tensors, 3), 10) as pieces:
            assert digest_of(load(pieces, tensors)) == published.digest
    with (
        pytest.raises(WeightSyncError, match=r"w: no policy replica holds the slice \(64, 48\) at \(0, 48\)"),
        receiver("zmq").fetch(target_of(published, publishers[0]), layout_of(tensors), 10),
    ):
        pass


def test_a_slice_corrupted_in_transit_is_caught_and_named(publishers, receiver, monkeypatch):
    published = publishers[0].publish(5, TENSORS, None)
    original = snapshots.Snapshot.read

    def corrupting(self, piece):
        data = original(self, piece)
        if piece.name != "w":
            return data
        copy = bytearray(data)
        copy[1234] ^= 4
        return memoryview(copy)

    monkeypatch.setattr(snapshots.Snapshot, "read", corrupting)
    with receiver("zmq").fetch(target_of(published, publishers[0]), layout_of(TENSORS), 10) as pieces:
        loaded = load(pieces)
        assert digest_of(loaded) != published.digest
        assert tensor_digests(loaded)["w"] != pieces.digests["w"]
        assert digest_of({**loaded, "w": TENSORS["w"]}) == published.digest


def test_a_version_dropped_in_the_middle_comes_from_another(publishers, receiver, monkeypatch, subtests):
    monkeypatch.setattr(wire, "REQUEST_BYTES", 1 << 16)
    monkeypatch.setattr(wire, "SLICE_BYTES", 1 << 14)
    for version, transport in ((5, "zmq"), (6, "gloo")):
        published, _ = [publisher.publish(version, TENSORS, None) for publisher in publishers]
        for survivors in (publishers, publishers[1:]):
            with (
                subtests.test(transport=transport, survivors=len(survivors)),
                receiver(transport).fetch(target_of(published, *survivors), layout_of(TENSORS), 10) as pieces,
            ):
                got = iter(pieces)
                first = next(got)
                survivors[0].retain(version + 1)
                if len(survivors) == 2:
                    assert digest_of(load([first, *got])) == published.digest
                else:
                    with pytest.raises(WeightSyncError, match=f"version {version} is gone"):
                        list(got)


def test_a_stalled_publisher_is_named_when_it_is_the_only_one(receiver, silent):
    target = WeightTarget(version=5, digest="", sources=(silent,), hosts=("here",))
    began = time.monotonic()
    with (
        pytest.raises(WeightSyncError, match=f"version 5 cannot be fetched: {silent}: no answer for 0.3 s"),
        receiver(stall_s=0.3).fetch(target, layout_of(TENSORS), 30),
    ):
        pass
    with (
        pytest.raises(WeightSyncError, match="version 5 cannot be fetched"),
        receiver(stall_s=25.0).fetch(target, layout_of(TENSORS), 60, interrupted=lambda: True),
    ):
        pass
    assert time.monotonic() - began < 10  # not the 30 s that a transfer may take


def test_a_fetch_that_is_interrupted_ends_with_what_it_has(publishers, receiver):
    published = publishers[0].publish(5, TENSORS, None)
    is_over = []
    with receiver("zmq").fetch(
        target_of(published, publishers[0]), layout_of(TENSORS), 10, interrupted=lambda: bool(is_over)
    ) as pieces:
        is_over.append(True)
        assert [*pieces] == []


def hasten(monkeypatch, endpoint, is_time=lambda: True):
    """Let the silence of one publisher last 16 times as long as it does; others keep the time that they may take."""
    silent_s = Source.silent_s.fget

    def hastened(source):
        return silent_s(source) * (16 if source.endpoint == endpoint and is_time() else 1)

    monkeypatch.setattr(Source, "silent_s", property(hastened))


def test_a_stalled_publisher_does_not_stop_the_others(publishers, receiver, silent, monkeypatch, subtests):
    hasten(monkeypatch, silent)
    published = publishers[0].publish(5, TENSORS, None)
    target = target_of(published, silent, publishers[0])
    for transport in ("zmq", "gloo", "auto"):
        with (
            subtests.test(transport=transport),
            receiver(transport).fetch(target, layout_of(TENSORS), 10) as pieces,
        ):
            assert digest_of(load(pieces)) == published.digest


def test_nobody_waits_for_another_host_when_this_one_has_everything(publishers, receiver, silent):
    published = publishers[0].publish(5, TENSORS, None)
    target = target_of(published, silent, publishers[0], hosts=["there", "here"])
    began = time.monotonic()
    with receiver(stall_s=20.0).fetch(target, layout_of(TENSORS), 60) as pieces:
        assert digest_of(load(pieces)) == published.digest
    assert time.monotonic() - began < 10


@pytest.mark.parametrize(("transport", "rescue"), [("zmq", True), ("gloo", True), ("gloo", False)])
def test_a_publisher_that_stalls_in_the_middle_is_replaced_or_named(
    publishers, receiver, monkeypatch, rescue, transport
):
    published, _ = [publisher.publish(5, TENSORS, None) for publisher in publishers]
    original = snapshots.Snapshot.read
    stalled, gave_in, release = [], [], threading.Event()

    def stalling(self, piece):
        own = publishers[0]._server._published[5].snapshot
        if self is own:
            stalled.append(piece)
            gave_in.append(not release.wait(20))
        return original(self, piece)

    monkeypatch.setattr(snapshots.Snapshot, "read", stalling)
    hasten(monkeypatch, publishers[0].endpoint, lambda: stalled)
    sources = publishers if rescue else publishers[:1]
    try:
        with receiver(transport).fetch(target_of(published, *sources), layout_of(TENSORS), 10) as pieces:
            if rescue:
                assert digest_of(load(pieces)) == published.digest
            else:
                with pytest.raises(WeightSyncError, match=f"{publishers[0].endpoint}: no answer for 5 s"):
                    list(pieces)
        assert stalled
        assert not gave_in
    finally:
        release.set()


def test_a_sender_that_has_ended_is_an_answer(publishers, receiver, monkeypatch):
    def ended(self, request, slices):
        raise TransportError("it was asked for nothing")

    monkeypatch.setattr(process_group.Sender, "send", ended)
    published = publishers[0].publish(5, TENSORS, None)
    began = time.monotonic()
    with (
        receiver("gloo", stall_s=20.0).fetch(target_of(published, publishers[0]), layout_of(TENSORS), 60) as pieces,
        pytest.raises(WeightSyncError, match=f"{publishers[0].endpoint}: it was asked for nothing"),
    ):
        list(pieces)
    assert time.monotonic() - began < 10
    assert publishers[0].held == (5,)


def test_closing_waits_for_all_senders_together(publishers, monkeypatch):
    class Stuck:
        waited = 0.0

        def close(self):
            pass

        def join(self, timeout_s):
            Stuck.waited += timeout_s
            time.sleep(timeout_s)

    monkeypatch.setattr(server, "_JOIN_S", 0.2)
    publishers[0]._server._senders.update({bytes([index]): Stuck() for index in range(5)})
    publishers[0].close()
    assert 0.1 < Stuck.waited < 0.3


def test_a_malformed_answer_counts_as_a_failure_of_its_publisher(publishers, receiver, monkeypatch):
    published = publishers[0].publish(5, TENSORS, None)
    original = snapshots.Snapshot.read
    monkeypatch.setattr(snapshots.Snapshot, "read", lambda self, piece: original(self, piece)[:-4])
    with (
        receiver("zmq").fetch(target_of(published, publishers[0]), layout_of(TENSORS), 5) as pieces,
        pytest.raises(WeightSyncError, match=r"bytes for a slice of"),
    ):
        list(pieces)


def test_a_transfer_may_take_as_long_as_it_needs(publishers, receiver, monkeypatch):
    monkeypatch.setattr(wire, "REQUEST_BYTES", 1)
    monkeypatch.setattr(wire, "SLICE_BYTES", 1 << 14)
    published = publishers[0].publish(5, TENSORS, None)
    original, pause = snapshots.Snapshot.read, threading.Event()

    def slow(self, piece):
        pause.wait(0.015)
        return original(self, piece)

    monkeypatch.setattr(snapshots.Snapshot, "read", slow)
    began = time.monotonic()
    with receiver("zmq").fetch(target_of(published, publishers[0]), layout_of(TENSORS), 1.0) as pieces:
        assert list(pieces)
    assert time.monotonic() - began > 1.0


def test_sources_that_cannot_give_the_version_are_refused_with_the_reason(publishers, receiver, subtests):
    published = publishers[0].publish(5, TENSORS, None)
    other = publishers[1].publish(5, {**TENSORS, "norm": TENSORS["norm"] + 1}, None)
    publishers[1].publish(6, TENSORS, None)

    def refused(reason, target, run_id="run"):
        with (
            subtests.test(reason=reason),
            pytest.raises(WeightSyncError, match=reason),
            receiver(run_id=run_id).fetch(target, layout_of(TENSORS), 5),
        ):
            pass

    target = target_of(published, publishers[0])
    refused("it serves the run 'run'", target, run_id="other")
    refused(f"its version 5 has the digest .*, not {published.digest}", target_of(published, publishers[1]))
    publishers[1].retain(6)
    refused(r"weights version 5 is gone: tcp://.*: it holds only the versions 6", target_of(other, publishers[1]))
    publishers[0]._server._published[5].manifest.digests["w"] = -1
    refused("what it says of version 5 is malformed: w: -1 is no digest", target)


def test_a_layout_that_does_not_fit_is_refused_with_the_first_tensor(publishers, receiver, subtests):
    target = target_of(publishers[0].publish(5, TENSORS, None), publishers[0])
    for wrong, message in [
        ({**TENSORS, "w": TENSORS["w"].bfloat16()}, "w: published as float32"),
        ({**TENSORS, "w": TENSORS["w"][:, :90]}, r"w: published as float32 \(64, 96\), the engine holds .*90"),
        ({**TENSORS, "more": torch.zeros(1)}, "more: the engine wants it, and no policy replica publishes it"),
        ({"w": TENSORS["w"]}, "embed: published, and the engine's layout lacks it"),
        ({**TENSORS, "embed": torch.zeros(4096, 96)}, r"embed: published as float32 \(4000, 96\), .* \(4096, 96\)"),
        ({"w": TENSORS["w"], "embed": TENSORS["embed"].half(), "a": torch.zeros(1)}, "a: the engine wants it"),
        ({"w": TENSORS["w"], "embed": TENSORS["embed"].half()}, "embed: published as float32 .* holds float16"),
    ]:
        with (
            subtests.test(message=message),
            pytest.raises(WeightSyncError, match=f"^{message}"),
            receiver().fetch(target, layout_of(wrong), 5),
        ):
            pass


def test_shared_memory_alone_is_refused_across_hosts(publishers, receiver):
    published = publishers[0].publish(5, TENSORS, None)
    target = target_of(published, publishers[0], hosts=["there"])
    with (
        pytest.raises(WeightSyncError, match=r"sync.transport 'shared-memory' on host 'here' \(theirs: there\)"),
        receiver("shared-memory").fetch(target, layout_of(TENSORS), 5),
    ):
        pass
    with receiver("auto").fetch(target, layout_of(TENSORS), 5) as pieces:
        assert digest_of(load(pieces)) == published.digest


def test_an_unmapped_file_falls_back_to_the_network_only_if_it_may(publishers, receiver, tmp_path):
    published = publishers[0].publish(5, TENSORS, None)
    for path in tmp_path.iterdir():
        path.unlink()
    target = target_of(published, publishers[0])
    with receiver("auto").fetch(target, layout_of(TENSORS), 5) as pieces:
        assert digest_of(load(pieces)) == published.digest
    with (
        pytest.raises(WeightSyncError, match="cannot be mapped here"),
        receiver("shared-memory").fetch(target, layout_of(TENSORS), 5),
    ):
        pass


def test_publishers_of_the_same_rack_send_alone(publishers, receiver, subtests):
    for rack, senders in [("2", [False, True]), ("3", [True, True]), ("", [True, True])]:
        with subtests.test(rack=rack, senders=senders):
            published = [publisher.publish(1, TENSORS, torch.float32) for publisher in publishers]
            target = attrs.evolve(target_of(published[0], *publishers, hosts=["there", "yonder"]), racks=("1", "2"))
            with receiver("zmq", rack=rack).fetch(target, layout_of(TENSORS), 5.0) as pieces:
                loaded = load(pieces)
            assert digest_of(loaded) == published[0].digest
            lent = [publisher._server._published[1].snapshot.file._lent for publisher in publishers]
            assert [isinstance(each, weakref.ref) for each in lent] == senders
