"""Versions on a disk: written by publishers, read by receivers."""

import contextlib
import json
import logging
import re
import shutil
import threading
from pathlib import Path

import attrs
import pytest
import torch

from cosmos_core.errors import WeightSyncError
from cosmos_core.protocols import TensorSlice
from cosmos_core.transport.directives import WeightTarget
from cosmos_core.weights import disk
from cosmos_core.weights.digest import add_digests, digest_of
from cosmos_core.weights.disk import VersionWriter
from cosmos_core.weights.publisher import WeightPublisher
from cosmos_core.weights.receiver import WeightReceiver
from cosmos_core.weights.shards import LocalShard

torch.set_num_threads(1)

TENSORS = {
    "embed": torch.randn(4000, 96),
    "w": torch.randn(64, 96),
    "experts": torch.randn(4, 30, 20),
    "norm": torch.randn(96).double(),
    "none": torch.zeros(0, 4),
    "scalar": torch.tensor(3.0),
}


@pytest.fixture
def stored(tmp_path):
    return tmp_path / "stored"


@pytest.fixture
def publish(tmp_path, stored):
    """A publisher that stores what it publishes; how it does may be said."""
    (tmp_path / "files").mkdir()
    with contextlib.ExitStack() as stack:

        def make(*, is_only=True, removes=True, run_id="run", directory=None):
            writer = VersionWriter(directory or str(stored), run_id, is_only=is_only, removes=removes)
            return stack.enter_context(WeightPublisher(run_id, directory=tmp_path / "files", writer=writer))

        yield make


def halves(tensors, ranks):
    """Rank r of n holds the r-th part of the last dim; what has one dim at most is held by every rank."""
    layout = {rank: [] for rank in range(ranks)}
    for rank, held in layout.items():
        for name, tensor in tensors.items():
            shape, start = list(tensor.shape), [0] * tensor.dim()
            if len(shape) > 1:
                shape[-1] //= ranks
                start[-1] = rank * shape[-1]
            held.append((TensorSlice(name=name, start=tuple(start), shape=tuple(shape)), str(tensor.dtype)[6:]))
    return layout


def fetch(published, directory, *, ranks=1, transport="disk", sources=(), run_id="run", tensors=TENSORS, stall_s=5.0):
    """The whole tensors, put together, and how many bytes came."""
    target = WeightTarget(
        version=published.version, digest=published.digest, sources=tuple(sources), hosts=("here",) * len(sources)
    )
    loaded = {name: torch.full_like(tensor, torch.nan) for name, tensor in tensors.items()}
    nbytes = 0
    receiver = WeightReceiver(transport, run_id=run_id, host="here", stall_s=stall_s, directory=str(directory))
    with receiver, receiver.fetch(target, halves(tensors, ranks), 10) as pieces:
        for _, piece, data in pieces:
            loaded[piece.name][tuple(slice(s, s + n) for s, n in zip(piece.start, piece.shape, strict=True))] = data
            nbytes += data.nbytes
    return loaded, nbytes


def test_what_was_published_is_read_in_another_layout(publish, stored, monkeypatch, subtests):
    monkeypatch.setattr(disk, "_READ_BYTES", 3 << 12)
    for version, block_bytes in ((5, 1 << 12), (6, 1 << 20)):
        monkeypatch.setattr(disk, "BLOCK_BYTES", block_bytes)
        published = publish().publish(version, TENSORS, None)
        for ranks in (1, 2):
            with subtests.test(block_bytes=block_bytes, ranks=ranks):
                loaded, nbytes = fetch(published, stored, ranks=ranks)
                assert digest_of(loaded) == published.digest
                assert nbytes == sum(t.nbytes for t in TENSORS.values()) + (ranks - 1) * (96 * 8 + 4)


def test_only_what_is_wanted_is_read(publish, stored, monkeypatch):
    monkeypatch.setattr(disk, "BLOCK_BYTES", 1 << 12)
    published = publish().publish(5, TENSORS, None)
    read, original = [], disk.StoredFile._checked

    def counting(self, first, last):
        data = original(self, first, last)
        read.append(len(data))
        return data

    monkeypatch.setattr(disk.StoredFile, "_checked", counting)
    wanted = [(0, TensorSlice(name="embed", start=(first, 0), shape=(500, 96))) for first in (3000, 1000)]
    ready, _ = disk.stored_parts(str(stored), "run", target_of(published))
    found = {piece.start[0]: data for _, piece, data in ready[0].read(wanted)}
    assert all(torch.equal(data, TENSORS["embed"][first : first + 500]) for first, data in found.items())
    assert len(read) == len(found) == 2
    assert sum(read) <= 2 * (500 * 96 * 4 + (2 << 12))


def target_of(published):
    return WeightTarget(version=published.version, digest=published.digest, sources=(), hosts=())


def test_parts_of_several_processes_make_a_whole_and_replicas_write_each_once(publish, stored):
    tensors = {"w": TENSORS["w"]}
    for _replica in range(2):
        publishers, staged = [publish(), publish()], []
        for rank, publisher in enumerate(publishers):
            half = tensors["w"][:, 48 * rank : 48 * rank + 48]
            shard = LocalShard(tensor=half, start=(0, 48 * rank), shape=(64, 96))
            staged.append(publisher.stage(1, {"w": shard}, None))
        total = add_digests(snapshot.digests() for snapshot in staged)
        published, *_ = [p.seal(s, digests=total) for p, s in zip(publishers, staged, strict=True)]
    (folder,) = (stored / "run").iterdir()
    assert folder.name == f"v1-{published.digest}"
    assert sorted(path.suffix for path in folder.iterdir()) == [".bin", ".bin", ".json", ".json"]
    assert digest_of(fetch(published, stored, ranks=3, tensors=tensors)[0]) == published.digest
    next(folder.glob("*.json")).unlink()
    with pytest.raises(WeightSyncError, match=r"w: no policy replica holds the slice"):
        fetch(published, stored, tensors=tensors)


def test_old_versions_are_removed_whole_or_not(publish, stored):
    publisher = publish()
    for version in range(1, 5):
        publisher.publish(version, {"w": TENSORS["w"] + version}, None)
    (stored / "run" / "v2-0123").mkdir()
    (stored / "run" / "notes").mkdir()
    publisher.retain(3)
    publisher.close()
    assert sorted(path.name.partition("-")[0] for path in (stored / "run").iterdir()) == ["notes", "v3", "v4"]


def only(path: Path, pattern: str) -> Path:
    (found,) = path.rglob(pattern)
    return found


def damage(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def test_a_damaged_file_is_refused_with_the_place(publish, stored, monkeypatch):
    monkeypatch.setattr(disk, "BLOCK_BYTES", 1 << 12)
    published = publish().publish(5, TENSORS, None)
    content = only(stored, "*.bin")
    damage(content, 10_000)
    with pytest.raises(WeightSyncError, match=rf"{content}: bytes 8,192 to 12,288 are not what was written"):
        fetch(published, stored)


def edited(folder: Path, **changes) -> None:
    """Say something else in the description of a part."""
    path = only(folder, "*.json")
    said = json.loads(path.read_text())
    said["manifest"].update(changes.pop("manifest", {}))
    path.write_text(json.dumps({**said, **changes}))


MISFITS = {
    r"\.bin is not there, and 1,.* were written": lambda folder: only(folder, "*.bin").unlink(),
    r"\.bin has 8 bytes, .*truncated or foreign": lambda folder: only(folder, "*.bin").write_bytes(b"COSMOSW1"),
    r"\.json: the description is damaged": lambda folder: only(folder, "*.json").write_text('{"run_id'),
    r"\.json: it is of the run 'other', not 'run'": lambda folder: edited(folder, run_id="other"),
    r"\.json: format 2, and this release reads 1": lambda folder: edited(folder, format=2),
    r"\.json: it is of version 4 with": lambda folder: edited(folder, manifest={"version": 4}),
    r"with the digest f0, not of": lambda folder: edited(folder, manifest={"digest": "f0"}),
    r"the description is damaged: it contradicts itself": lambda folder: edited(folder, manifest={"digests": {"w": 1}}),
    r"damaged: w: -1 is no digest": lambda folder: edited(folder, manifest={"digests": {"w": -1}}),
    r"w: 18\d+16 is no digest": lambda folder: edited(folder, manifest={"digests": {"w": 2**64}}),
    r"it contradicts itself$": lambda folder: edited(folder, manifest={"path": "../x"}),
    r"damaged: it contradicts itself$": lambda folder: edited(folder, block_bytes=0),
    r"v5-\w+: nothing is stored there": lambda folder: only(folder, "*.json").unlink(),
}


def test_a_part_that_is_not_what_it_says_is_refused_by_name(publish, stored, subtests):
    published = publish().publish(5, TENSORS, None)
    for number, (message, change) in enumerate(MISFITS.items()):
        damaged = stored.with_name(f"damaged-{number}")
        shutil.copytree(stored, damaged)
        change(damaged)
        with subtests.test(message=message), pytest.raises(WeightSyncError, match=message):
            fetch(published, damaged)


def test_a_version_of_the_same_number_and_other_weights_is_another(publish, stored):
    publish().publish(5, TENSORS, None)
    other = publish(directory=str(stored.with_name("elsewhere"))).publish(5, {**TENSORS, "w": TENSORS["w"] + 1}, None)
    with pytest.raises(WeightSyncError, match=f"v5-{other.digest}: nothing is stored there"):
        fetch(other, stored)


def test_auto_reads_what_is_stored_if_no_source_answers(publish, stored, caplog):
    publisher = publish(is_only=False)
    published = publisher.publish(5, TENSORS, None)
    publisher.close()
    with caplog.at_level(logging.INFO, "cosmos_core.weights"):
        loaded, _ = fetch(published, stored, transport="auto", sources=[publisher.endpoint], stall_s=0.3)
    assert digest_of(loaded) == published.digest
    assert f"{publisher.endpoint}: no answer for 0.3 s; it is read from {stored} instead" in caplog.text
    assert f"weights version 5 comes from 1 part(s) in {stored}" in caplog.text
    damage(only(stored, "*.json"), 0)
    with pytest.raises(WeightSyncError, match=rf"{publisher.endpoint}: no answer .*; .*the description is damaged"):
        fetch(published, stored, transport="auto", sources=[publisher.endpoint], stall_s=0.3)


def test_a_fetch_says_whether_it_reads_what_is_stored_which_may_be_forbidden(publish, stored):
    publisher = publish()
    published = publisher.publish(5, TENSORS, None)
    publisher.close()
    target = attrs.evolve(target_of(published), sources=(publisher.endpoint,), hosts=("here",))
    with WeightReceiver("auto", run_id="run", host="here", stall_s=0.3, directory=str(stored)) as receiver:
        with receiver.fetch(target, halves(TENSORS, 1), 10) as pieces:
            assert pieces.is_stored
        with (
            pytest.raises(WeightSyncError, match=f"{publisher.endpoint}: no answer for 0.3 s$"),
            receiver.fetch(target, halves(TENSORS, 1), 10, falls_back=False),
        ):
            pass


def test_sources_come_before_what_is_stored(publish, stored):
    publisher = publish()
    published = publisher.publish(5, TENSORS, None)
    for path in (stored / "run").rglob("*.bin"):
        path.unlink()
    loaded, _ = fetch(published, stored, transport="auto", sources=[publisher.endpoint])
    assert digest_of(loaded) == published.digest


def test_writing_beside_keeps_the_newest_only_and_never_a_snapshot_written_over(publish, stored, monkeypatch, caplog):
    busy, may_go = threading.Event(), threading.Event()
    original = disk.share_of

    def slow(manifest):
        busy.set()
        may_go.wait(10)
        return original(manifest)

    monkeypatch.setattr(disk, "share_of", slow)
    publisher, tensors = publish(is_only=False, removes=False), {"w": TENSORS["w"]}
    first = publisher.publish(1, tensors, None)
    assert busy.wait(10)
    with caplog.at_level(logging.INFO, "cosmos_core.weights"):
        for version in (2, 3):
            # Training goes on, and would take the file of the first version for the third, were it not read.
            publisher.retain(version)
            last = publisher.publish(version, {"w": TENSORS["w"] + version}, None)
    assert "weights version 2 was not stored: writing cannot keep up" in caplog.text
    may_go.set()
    publisher.close()
    for published in (first, last):
        assert digest_of(fetch(published, stored, tensors=tensors)[0]) == published.digest
    assert len(list((stored / "run").iterdir())) == 2


def test_a_disk_that_cannot_be_written_stops_who_has_nothing_else(publish, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    where = str(tmp_path / "file" / "below")
    with pytest.raises(WeightSyncError, match=rf"weights at {where}/run/v1-\w+: .*Not a directory"):
        publish(directory=where).publish(1, {"w": TENSORS["w"]}, None)
    beside = publish(directory=where, is_only=False)
    beside.publish(1, {"w": TENSORS["w"]}, None)
    beside.close()
    assert "weights version 1 was not stored, training goes on" in caplog.text


def test_a_part_that_was_not_written_to_its_end_is_not_there(publish, stored, monkeypatch):
    def full(block):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(disk, "checksum", full)
        with pytest.raises(WeightSyncError, match="No space left on device"):
            publish().publish(1, TENSORS, None)
    assert list(stored.rglob("*.bin"))
    published = publish(directory=str(stored.with_name("elsewhere"))).publish(1, TENSORS, None)
    with pytest.raises(WeightSyncError, match="nothing is stored there"):
        fetch(published, stored)
    assert publish().publish(1, TENSORS, None) == published
    assert digest_of(fetch(published, stored)[0]) == published.digest


@pytest.mark.parametrize("is_known", [True, False])
def test_a_version_that_others_removed_while_it_was_written_stops_nobody(
    publish, stored, monkeypatch, caplog, is_known
):
    """The slower of two replicas writes version 5; the faster one has gone on to 6, and nobody needs 5 any more."""
    slow, fast = publish(), publish()
    tensors, original, may_interfere = {"w": TENSORS["w"]}, disk.checksum, [True]

    def interrupted(block):
        if may_interfere.pop() if may_interfere else False:
            fast.publish(6, {"w": TENSORS["w"] + 1}, None)
            if is_known:
                slow.retain(6)
            fast.retain(6)
            fast._writer.close()
        return original(block)

    monkeypatch.setattr(disk, "checksum", interrupted)
    with caplog.at_level(logging.INFO, "cosmos_core.weights"):
        slow.publish(5, tensors, None)
    assert re.search(r"version 5 was not stored, as nobody needs it any more: .*v5-\w+: .*No such file", caplog.text)
    assert [path.name.partition("-")[0] for path in (stored / "run").iterdir()] == ["v6"]


def test_a_folder_that_vanished_before_anything_newer_stands_is_an_error(publish, stored, monkeypatch):
    original = disk.checksum

    def interrupted(block):
        shutil.rmtree(stored)
        return original(block)

    monkeypatch.setattr(disk, "checksum", interrupted)
    with pytest.raises(WeightSyncError, match=r"v5-\w+: .*No such file"):
        publish().publish(5, {"w": TENSORS["w"]}, None)


def test_a_version_is_in_the_writers_hands_before_it_may_be_dropped(publish, monkeypatch, caplog):
    publisher = publish()
    add = publisher._server.add

    def dropped_at_once(published):
        replaced = add(published)
        publisher.retain(published.manifest.version + 1)
        return replaced

    staged = publisher.stage(5, TENSORS, None)
    publisher.publish(4, TENSORS, None)
    # The file of version 4 waits for the next version, so that of version 5 goes for good.
    publisher.retain(5)
    monkeypatch.setattr(publisher._server, "add", dropped_at_once)
    with caplog.at_level(logging.INFO, "cosmos_core.weights"):
        publisher.seal(staged)
    assert publisher.held == ()
    assert "was not stored" not in caplog.text


def test_nothing_is_looked_for_twice(publish, stored, monkeypatch):
    looked, original = [], disk.VersionWriter._remove_before
    monkeypatch.setattr(disk.VersionWriter, "_remove_before", lambda self, v: looked.append(v) or original(self, v))
    publisher = publish()
    for oldest in (0, 0, 3, 3, 2, 4):
        publisher.retain(oldest)
    publisher.close()
    assert looked == [3, 4]


class LibraryError(Exception):
    """As botocore's, which are no OSError."""


def test_errors_of_a_file_systems_own_library_are_told(publish, stored, monkeypatch, caplog):
    def unreachable(url):
        raise LibraryError("Unable to locate credentials")

    published = publish().publish(5, TENSORS, None)
    monkeypatch.setattr(disk, "file_system", unreachable)
    with pytest.raises(WeightSyncError, match=r"weights at .*v5-\w+: LibraryError: Unable to locate credentials"):
        fetch(published, stored)
    with pytest.raises(WeightSyncError, match=r"weights at .*v6-\w+: LibraryError: Unable to locate credentials"):
        publish().publish(6, TENSORS, None)
    beside = publish(is_only=False)
    beside.publish(6, TENSORS, None)
    beside.retain(6)
    beside.close()
    assert "weights version 6 was not stored, training goes on: weights at" in caplog.text
    assert "old versions were not removed: weights at" in caplog.text


def test_what_ends_a_job_that_nobody_waits_for_is_told(publish, stored, monkeypatch, caplog):
    def broken(self, oldest):
        raise KeyError("a fault of our own")

    monkeypatch.setattr(disk.VersionWriter, "_remove_before", broken)
    publisher = publish()
    publisher.retain(6)
    publisher.close()
    assert "weights are not stored as they should be, training goes on: KeyError('a fault of our own')" in caplog.text


def test_disk_without_a_directory_is_refused():
    target = WeightTarget(version=1, digest="", sources=(), hosts=())
    with (
        WeightReceiver("disk", run_id="run", host="here") as receiver,
        pytest.raises(WeightSyncError, match=r"needs sync\.directory"),
        receiver.fetch(target, halves(TENSORS, 1), 5),
    ):
        pass


def test_an_unknown_file_system_is_named():
    with pytest.raises(WeightSyncError, match=r"weights at nowhere://x: .*nowhere"), disk.access("nowhere://x"):
        pass
