from __future__ import annotations

import gc
import logging
import weakref

import pytest
import torch

from cosmos_core.protocols.quantization import FORMATS
from cosmos_core.rollout.serving.updates import Update
from cosmos_core.weights import slices, staging
from cosmos_core.weights.digest import Digests, digest_of, tensor_digests
from cosmos_core.weights.publisher import WeightPublisher
from cosmos_core.weights.quantization import MatrixShare, matrix_shares, not_finite, quantise_tensors
from cosmos_core.weights.shards import local_shards
from cosmos_core.weights.snapshot import take_snapshot, view
from tests.streams import Streams

torch.set_num_threads(1)

DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e8m0fnu,
    torch.int64,
    torch.uint8,
    torch.bool,
]


@pytest.fixture
def streams(monkeypatch):
    return Streams(monkeypatch)


def tensors():
    """Of every dtype and shape that is sent, one of them larger than a buffer of the tests."""
    generator = torch.Generator().manual_seed(0)
    made = {str(dtype): torch.randint(0, 2, (37, 50), generator=generator).to(dtype) for dtype in DTYPES}
    made["transposed"] = torch.randn(40, 60, generator=generator).t()
    return {**made, "scalar": torch.tensor(2.5), "empty": torch.empty(0, 4)}


def test_a_device_copies_and_digests_piece_by_piece_what_was_there_when_it_was_asked(streams, monkeypatch, tmp_path):
    monkeypatch.setattr(staging, "BUFFER_BYTES", 512)
    pieces = []
    add = Digests.add
    monkeypatch.setattr(Digests, "add", lambda *of, **place: pieces.append(of[2].nbytes) or add(*of, **place))
    held = tensors()
    expected = {name: (t.bfloat16() if t.is_floating_point() else t).clone() for name, t in held.items()}
    snapshot = take_snapshot(1, held, torch.bfloat16, directory=tmp_path)
    assert not pieces, "it is done beside all other work"
    staging.settle()
    for tensor in held.values():
        tensor.zero_()
    assert snapshot.digests() == snapshot.digests()
    assert max(pieces) <= 512
    assert snapshot.digests() == tensor_digests(expected)
    assert all(torch.equal(view(snapshot.file.buffer, each), expected[each.name]) for each in snapshot.entries)


def test_work_beside_other_work_comes_after_what_was_asked_for_before(streams):
    done, beside = [], staging.Beside()
    streams.now.ask(lambda: done.append("written"))
    beside.do(torch.device("cpu"), lambda: done.append("copied"))
    assert not done
    beside.wait()
    assert done == ["written", "copied"]


def test_work_that_fails_ends_before_what_it_uses_is_given_back(streams):
    done = []

    def fail():
        staging.cuda.current_stream(None).ask(lambda: done.append("copied"))
        raise RuntimeError("no room")

    with pytest.raises(RuntimeError, match="no room"):
        streams.do(staging.Beside(), torch.device("cpu"), fail)
    assert done == ["copied"]
    assert not staging._reading


def test_a_snapshot_is_dropped_once_nothing_writes_to_it(streams, tmp_path):
    held = {"w": torch.ones(1000)}
    with WeightPublisher("run", directory=tmp_path) as publisher:
        dropped, left = publisher.stage(1, held, None), publisher.stage(2, held, None)
        publisher.discard(dropped)
        assert torch.equal(view(dropped.file.buffer, dropped.entries[0]), held["w"])
    assert torch.equal(view(left.file.buffer, left.entries[0]), held["w"])
    assert [*tmp_path.iterdir()] == []


def test_codes_and_scales_are_made_and_digested_on_the_device(streams, tmp_path):
    form, matrix = FORMATS["mxfp4"], torch.randn(64, 96)
    share = MatrixShare(form=form, name="w", shape=(64, 96), start=(0, 0), size=(64, 96))
    snapshot = take_snapshot(1, {"w": matrix}, None, quantised={"w": share}, directory=tmp_path)
    assert snapshot.digests() == tensor_digests(quantise_tensors(form, {"w": matrix}, {"w": (64, 96)}))


def test_a_matrix_that_codes_cannot_hold_is_told_once_the_device_has_written_it(streams, tmp_path):
    spoilt = torch.full((2, 32), torch.nan)
    shares = matrix_shares(FORMATS["fp8"], {"w": spoilt}, {"w": (2, 32)})
    snapshot = take_snapshot(1, {"w": spoilt}, None, quantised=shares, directory=tmp_path)
    assert snapshot.problem().startswith("w: it has elements that are not finite")


def test_what_adapters_add_is_held_of_one_weight_at_a_time(streams, monkeypatch, tmp_path):
    """Beside other work, and with the bits of sums that are made all at once."""
    monkeypatch.setattr(staging, "BUFFER_BYTES", 512)
    held, alive = {name: torch.randn(30, 40) for name in "abc"}, []

    def merge(share):
        gc.collect()
        assert not [each for each in alive if each() is not None]
        made = share + 1.0
        alive.append(weakref.ref(made))
        return made

    sums = {name: tensor + 1.0 for name, tensor in held.items()}
    for form in (None, FORMATS["nvfp4"]):
        matrices = {} if form is None else dict.fromkeys("ab", (30, 40))
        quantised = {} if form is None else matrix_shares(form, held, matrices, dict.fromkeys(held, merge))
        expected = sums if form is None else quantise_tensors(form, sums, matrices)
        alive.clear()
        snapshot = take_snapshot(
            1, local_shards(held, dict.fromkeys(held, merge)), None, quantised=quantised, directory=tmp_path
        )
        assert not alive
        assert snapshot.digests() == tensor_digests(expected)
        assert len(alive) == 3


def test_memory_is_page_locked_once_for_as_long_as_it_is_used(streams, tmp_path):
    snapshot = take_snapshot(1, {"w": torch.zeros(1000)}, None, directory=tmp_path)
    assert list(streams.locked.values()) == [snapshot.file.size]
    snapshot.copying.wait()
    spare = snapshot.file
    later = take_snapshot(2, {"w": torch.zeros(1000)}, None, directory=tmp_path, spare=spare)
    later.copying.wait()
    assert later.file is spare
    assert len(streams.locked) == 1
    lent = later.read(later.entries[0].piece)
    del snapshot, later, spare
    gc.collect()
    assert len(streams.locked) == 1, "it is still sent"
    del lent
    gc.collect()
    assert streams.locked == {}


def test_memory_that_cannot_be_page_locked_is_told_and_used(streams, tmp_path, caplog):
    streams.error = 2
    with caplog.at_level(logging.WARNING):
        snapshot = take_snapshot(1, {"w": torch.ones(1000)}, None, directory=tmp_path)
    assert "4,064 bytes cannot be page-locked (CUDA error 2): copies are slow" in caplog.text
    assert snapshot.digests() == tensor_digests({"w": torch.ones(1000)})


def test_what_is_loaded_goes_through_two_buffers_of_fixed_size(streams, monkeypatch):
    made = []
    make = staging._page_locked
    monkeypatch.setattr(staging, "_page_locked", lambda size: made.append(size) or make(size))
    monkeypatch.setattr(staging, "BUFFER_BYTES", 512)
    asked = []
    # What is recorded on the stream that happens to be current says nothing of another device's copies.
    monkeypatch.setattr(streams, "current_stream", lambda device: asked.append(device) or streams.now)
    source = tensors()
    loaded = {name: torch.zeros_like(tensor) for name, tensor in source.items()}
    update = Update(1, loaded)
    for name, tensor in source.items():
        update.write(slices.whole(name, tuple(tensor.shape)), tensor)
    update.apply()
    assert digest_of(loaded) == digest_of(source)
    assert made == [512, 512]
    assert {*asked} == {torch.device("cpu")}


def test_what_arrives_comes_through_two_buffers_each_read_once_it_is_full(streams, monkeypatch):
    monkeypatch.setattr(staging, "BUFFER_BYTES", 512)
    copy = torch.Tensor.copy_

    def late(target, source, non_blocking=False):
        if non_blocking:
            streams.now.ask(lambda: copy(target, source))
            return target
        return copy(target, source)

    received = [torch.randint(256, (size,), dtype=torch.uint8) for size in (1300, 0, 7, 512)]
    assert all(map(torch.equal, staging.download(received), received)), "copies that are made at once"
    monkeypatch.setattr(torch.Tensor, "copy_", late)
    made = staging.download(received)
    assert all(map(torch.equal, made, received))
    assert not {each.data_ptr() for each in made if len(each)} & {each.data_ptr() for each in received}


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_quantising_asks_nothing_of_a_device_but_whether_matrices_are_finite(form):
    """A tensor without values has a device of which nothing can be asked."""
    held, merge = {"w": torch.empty(70, 100, device="meta")}, lambda share: share + 1.0
    (share,) = matrix_shares(form, held, {"w": (70, 100)}, {"w": merge}).values()
    *made, is_finite = share.quantise(local_shards(held, {"w": merge})["w"].sent())
    assert [tuple(each.shape) for each in made] == [part.size for part in share.parts()]
    assert {each.device.type for each in (*made, is_finite)} == {"meta"}
    with pytest.raises((NotImplementedError, RuntimeError), match="meta"):
        not_finite({"w": is_finite})


def test_a_digest_asks_nothing_of_a_device_but_its_sums():
    digests = Digests()
    for dtype in DTYPES:
        digests.add("w", torch.empty(70, 1000, device="meta", dtype=dtype))
        digests.add("w", torch.empty(7, 10, device="meta", dtype=dtype), start=(3, 5), shape=(70, 70_000))
    (sums,) = digests._sums.values()
    assert {(weighted.device.type, weighted.shape) for *_, weighted in sums} == {("meta", torch.Size([]))}
    with pytest.raises((NotImplementedError, RuntimeError), match="meta"):
        digests.found()
