import contextlib
import errno
import multiprocessing
import os
import platform
import resource
import signal
import threading
import time
from pathlib import Path

import attrs
import pytest
import torch
from torch.distributed.checkpoint._fsspec_filesystem import FileSystem

from cosmos_core.errors import CheckpointError, DamagedCheckpointError
from cosmos_core.policy.batches.batch import Share
from cosmos_core.policy.checkpoints import checkpoint
from cosmos_core.policy.checkpoints import saver as saver_module
from cosmos_core.policy.checkpoints.checkpoint import Place
from cosmos_core.policy.checkpoints.reader import load_shares, restore
from cosmos_core.policy.checkpoints.saver import CheckpointSaver, Copied, checksum, copy_state, write_checkpoint
from cosmos_core.policy.processes.group import solo
from cosmos_core.policy.training.metrics import Stopwatch
from cosmos_core.testing.worlds import PRELOADED
from cosmos_core.transport.reports import CheckpointFailed, CheckpointSaved
from cosmos_core.weights.shards import local_shards


def place(step, stage=0):
    return Place(run_id="r", step=step, stage=stage, nonfinite_steps=1, unimitated_steps=4)


@pytest.fixture(params=["path", "memory"])
def url(request, tmp_path):
    if request.param == "memory":
        import fsspec

        yield f"memory://{tmp_path.name}/checkpoints"
        fsspec.filesystem("memory").store.clear()
    else:
        yield str(tmp_path / "checkpoints")


def steps(trainer, sequences, totals, number):
    for _ in range(number):
        trainer.train(Share(sequences=tuple(sequences), counts=totals), totals, solo(), Stopwatch(trainer.device))


def no_stage(index):
    raise AssertionError(index)


def test_a_resumed_trainer_goes_on_bit_by_bit(model, kit, url):
    sequences = kit.random_sequences(5)
    totals = kit.counts_of(sequences)
    trainer = kit.make_trainer(model)
    steps(trainer, sequences, totals, 3)
    torch.manual_seed(77)
    torch.rand(5)
    path = write_checkpoint(url, copy_state(trainer.state(), place(3)))
    expected_random = torch.rand(3)
    steps(trainer, sequences, totals, 2)

    resumed = kit.make_trainer(model, seed=5)
    restore(resumed, path, no_stage)
    assert torch.equal(torch.rand(3), expected_random)
    assert (resumed.step, resumed.nonfinite_steps, resumed.unimitated_steps) == (3, 1, 4)
    steps(resumed, sequences, totals, 2)
    assert resumed.state().keys() == trainer.state().keys()
    assert all(torch.equal(tensor, trainer.state()[name]) for name, tensor in resumed.state().items())
    assert any("exp_avg_sq" in name for name in resumed.state())


@pytest.fixture
def several_files(monkeypatch):
    """Small checkpoints are written as large ones are."""
    monkeypatch.setattr(saver_module, "_LEAST_BYTES", 1)


def test_one_file_of_several_that_cannot_be_written_is_told(model, kit, tmp_path, several_files, monkeypatch):
    create = FileSystem.create_stream

    def full(files, path, mode):
        if str(path).endswith("_2_0.distcp"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return create(files, path, mode)

    monkeypatch.setattr(FileSystem, "create_stream", full)
    with pytest.raises(CheckpointError, match=r"step-3: .*No space left on device"):
        write_checkpoint(str(tmp_path), copy_state(kit.make_trainer(model).state(), place(3)))
    assert [*tmp_path.iterdir()] == []


def test_several_files_are_read_at_once_and_one_that_cannot_be_is_told(tmp_path, several_files, monkeypatch):
    expected = {f"model.{name}": torch.randn(50) for name in "abcd"}
    path = write_checkpoint(str(tmp_path), copy_state(expected, place(3)))
    create, together, broken = FileSystem.create_stream, threading.Barrier(4), []

    def opened(files, path, mode):
        if str(path).endswith(".distcp"):
            together.wait(60)
            if str(path)[-10:] in broken:
                raise OSError(errno.EIO, "Input/output error")
        return create(files, path, mode)

    monkeypatch.setattr(FileSystem, "create_stream", opened)
    found = {name: torch.zeros(50) for name in expected}
    load_shares(path, local_shards(found))
    assert all(torch.equal(found[name], each) for name, each in expected.items())
    broken += sorted(each.name[-10:] for each in Path(path).glob("*.distcp"))[2:]
    with pytest.raises(DamagedCheckpointError, match=r"step-3 is damaged: .*Input/output error"):
        load_shares(path, local_shards(found))


def test_memory_for_copies_that_is_page_locked_is_used_again(tmp_path, streams):
    state, outcomes = {"model.w": torch.zeros(1000)}, []
    saver = CheckpointSaver(str(tmp_path), 2, outcomes.append)
    for step in (1, 2):
        saver.save(state, place(step))
        state["model.w"] += 1
    saver.wait()
    assert len(streams.locked) == 1
    # Other memory is taken once that is given back.
    saver.save({"model.w": torch.zeros(2000)}, place(3))
    saver.wait()
    assert [streams.peak] == list(streams.locked.values())
    assert [outcome.step for outcome in outcomes] == [1, 2, 3]


@pytest.mark.usefixtures("several_files")
@pytest.mark.parametrize("copied", ["at once", "beside"])
def test_the_saved_state_is_that_of_the_moment(model, kit, tmp_path, request, copied):
    """Training goes on while a checkpoint is copied and written."""
    locked = request.getfixturevalue("streams").locked if copied == "beside" else {}
    sequences = kit.random_sequences(5)
    trainer = kit.make_trainer(model)
    before = {name: tensor.clone() for name, tensor in trainer.state().items()}
    outcomes, may_write = [], threading.Event()
    saver = CheckpointSaver(str(tmp_path), 2, outcomes.append)
    # The copy is begun, and its writer is held up until the weights have changed.
    saver._thread.submit(may_write.wait, 60)
    saver.save(trainer.state(), place(0))
    steps(trainer, sequences, kit.counts_of(sequences), 3)
    may_write.set()
    saver.wait()
    assert len(locked) == (copied == "beside")
    assert len([*tmp_path.glob("step-0/*.distcp")]) == 4
    assert outcomes == [CheckpointSaved(step=0, path=str(tmp_path / "step-0"), generation=0)]
    fresh = kit.make_trainer(model, seed=4)
    restore(fresh, outcomes[0].path, no_stage)
    assert all(torch.equal(tensor, before[name]) for name, tensor in fresh.state().items())


def test_the_newest_and_the_best_are_kept(model, kit, url):
    state = kit.make_trainer(model).state()
    outcomes = []
    saver = CheckpointSaver(url, 2, outcomes.append)
    for step in range(1, 6):
        saver.save(state, place(step))
        if step == 2:
            saver.wait()
            checkpoint.mark_best(url, 2)
    saver.wait()
    assert [outcome.step for outcome in outcomes] == [1, 2, 3, 4, 5]
    assert checkpoint.completed(url) == [2, 4, 5]


def test_a_checkpoint_of_an_abandoned_timeline_is_replaced(model, kit, url):
    first, second = kit.make_trainer(model), kit.make_trainer(model, seed=1)
    write_checkpoint(url, copy_state(first.state(), place(3)))
    path = write_checkpoint(url, copy_state(second.state(), place(3)))
    restore(first, path, no_stage)
    assert all(torch.equal(tensor, second.state()[name]) for name, tensor in first.state().items())


def test_who_was_given_up_and_writes_late_replaces_nothing_that_the_run_went_on_to(model, kit, url):
    early, late = kit.make_trainer(model), kit.make_trainer(model, seed=1)
    outcomes = []
    saver = CheckpointSaver(url, 2, outcomes.append)
    saver.save(early.state(), attrs.evolve(place(3), generation=7))
    saver.save(late.state(), attrs.evolve(place(3), generation=4))
    saver.wait()
    assert [(type(outcome), outcome.generation) for outcome in outcomes] == [
        (CheckpointSaved, 7),
        (CheckpointFailed, 4),
    ]
    assert "generation 7 has saved the step already, and this is generation 4" in outcomes[1].reason
    restore(late, outcomes[0].path, no_stage)
    assert all(torch.equal(tensor, early.state()[name]) for name, tensor in late.state().items())


def test_a_stage_is_taken_up_before_its_optimizer_is_loaded(model, kit, tmp_path):
    trainer = kit.make_trainer(model)
    path = write_checkpoint(str(tmp_path), copy_state(trainer.state(), place(9, stage=1)))
    begun = []

    def begin(index):
        begun.append(index)
        trainer.begin_stage(kit.stage_of(index=index), kit.Reinforce(), 1.0)

    restore(trainer, path, begin)
    assert begun == [1]


def test_a_checkpoint_of_another_model_is_refused(model, kit, tmp_path_factory):
    for change, message in [
        (
            {"intermediate_size": 40},
            r"model\.model\.layers\.0\.mlp\.gate_proj\.weight has shape \(32, 16\) there and \(40, 16\)",
        ),
        ({"num_hidden_layers": 3}, r"it lacks model\.model\.layers\.2\.self_attn"),
        ({"num_hidden_layers": 1}, r"it has \S*layers\.1\.\S* which this model lacks"),
    ]:
        tmp_path = tmp_path_factory.mktemp("case")
        path = write_checkpoint(str(tmp_path), copy_state(kit.make_trainer(model).state(), place(1)))
        other = type(model)(
            model.options, type(model.context)(path=None, config={**kit.QWEN3, **change}, assets=tmp_path)
        )
        with pytest.raises(CheckpointError, match=f"is of another model: {message}"):
            restore(kit.make_trainer(other), path, no_stage)


def flip(at):
    """Flips the lowest bit of a byte."""

    def damage(content):
        changed = bytearray(content)
        changed[at] ^= 1
        return bytes(changed)

    return damage


def cut(content):
    return content[:-9]


def gone(content):
    return None


def test_each_damage_of_each_file_is_refused_by_name(tmp_path, subtests):
    state = {f"{kind}.weight": torch.randn(40, 30) for kind in ("model", "optimizer.exp_avg")}
    path = write_checkpoint(str(tmp_path), copy_state(state, place(1)))
    expected = {name: tensor.clone() for name, tensor in state.items()}
    contents = {entry.name: entry.read_bytes() for entry in (tmp_path / "step-1").iterdir()}
    shard = contents["__0_0.distcp"]
    begin = shard.index(state["optimizer.exp_avg.weight"].numpy().tobytes())
    entry = shard.rindex(b"data/0", 0, shard.index(b"PK\x05\x06", begin))
    moment = r"is damaged: __0_0\.distcp: optimizer\.exp_avg\.weight"
    sizes = rf"has {len(shard) - 9:,} bytes, and {len(shard):,} were written"
    later = write_checkpoint(str(tmp_path), copy_state({name: tensor + 1 for name, tensor in state.items()}, place(2)))
    foreign = Path(later, "__0_0.distcp").read_bytes()
    for file, damage, message in [
        ("__0_0.distcp", flip(begin + 77), f"{moment} is not what was written"),
        (
            "__0_0.distcp",
            flip(entry),
            f"{moment} cannot be read",
        ),
        ("__0_0.distcp", lambda _: foreign, r"is damaged: __0_0\.distcp: \S+ is not what was written"),
        ("__0_0.distcp", cut, rf"is damaged: __0_0\.distcp {sizes}"),
        ("__0_0.distcp", gone, rf"is damaged: __0_0\.distcp, of {len(shard):,} bytes, is missing"),
        (".metadata", flip(300), r"is damaged: \.metadata is not what was written"),
        (".metadata", cut, r"is damaged: \.metadata has [0-9,]+ bytes, and [0-9,]+ were written"),
        (".metadata", gone, r"is damaged: \.metadata, of [0-9,]+ bytes, is missing"),
        ("complete.json", flip(30), r"complete\.json is damaged"),
        ("complete.json", cut, r"complete\.json is damaged"),
        ("complete.json", gone, r"is no complete checkpoint: it has no complete\.json"),
    ]:
        with subtests.test(file=file, message=message):
            target, content = tmp_path / "step-1" / file, damage(contents[file])
            target.unlink()
            if content is not None:
                target.write_bytes(content)
            with pytest.raises(DamagedCheckpointError, match=f"step-1.*{message}"):
                load_shares(path, local_shards(state))
            target.write_bytes(contents[file])
    load_shares(path, local_shards(state))
    assert all(torch.equal(tensor, expected[name]) for name, tensor in state.items())


def test_a_checkpoint_that_notes_no_checksums_is_loaded_and_said_to_be_unverified(tmp_path, caplog):
    state = {"model.weight": torch.zeros(3)}
    path = write_checkpoint(str(tmp_path), copy_state({"model.weight": torch.ones(3)}, place(1)))
    (tmp_path / "step-1" / "complete.json").write_bytes(checkpoint.marker(place(1)))
    load_shares(path, local_shards(state))
    assert state["model.weight"].tolist() == [1, 1, 1]
    assert "step-1 is of a release that noted no checksums: what is read of it is not verified" in caplog.text


def test_each_changed_bit_and_each_swapped_sector_changes_the_checksum():
    for size in (4, 512, 1204, 2340):
        raw = torch.randint(0, 256, (size,), dtype=torch.uint8)
        known = checksum(raw, torch.float32, (size // 4,))
        assert checksum(raw, torch.int32, (size // 4,)) != known
        assert checksum(raw, torch.float32, (1, size // 4)) != known
        for byte in range(0, size, 5):
            raw[byte] ^= 1 << byte % 8
            assert checksum(raw, torch.float32, (size // 4,)) != known, byte
            raw[byte] ^= 1 << byte % 8
        assert checksum(raw, torch.float32, (size // 4,)) == known
        if size > 1024:
            raw[:1024] = raw[:1024].roll(512)
            assert checksum(raw, torch.float32, (size // 4,)) != known


def test_an_unwritable_folder_is_reported_and_training_goes_on(model, kit, tmp_path):
    (tmp_path / "file").write_text("in the way")
    outcomes = []
    saver = CheckpointSaver(str(tmp_path / "file"), 2, outcomes.append)
    trainer = kit.make_trainer(model)
    saver.save(trainer.state(), place(4))
    saver.wait()
    (failed,) = outcomes
    assert isinstance(failed, CheckpointFailed)
    assert failed.step == 4
    assert "Not a directory" in failed.reason or "File exists" in failed.reason


def test_an_error_that_nobody_foresaw_ends_the_run_instead_of_leaving_it_waiting(model, kit, tmp_path):
    def refuse(outcome):
        raise ZeroDivisionError(outcome.step)

    saver = CheckpointSaver(str(tmp_path), 2, refuse)
    saver.check()
    saver.save(kit.make_trainer(model).state(), place(4))
    deadline = time.monotonic() + 10
    while not saver._writing.done() and time.monotonic() < deadline:
        time.sleep(0.01)
    with pytest.raises(ZeroDivisionError):
        saver.check()
    saver.check()


def test_replacing_a_checkpoint_leaves_nothing_else(tmp_path):
    for value in (1.0, 2.0):
        write_checkpoint(str(tmp_path), Copied(place=place(3), shares=local_shards({"x": torch.full((2,), value)})))
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-3"]


class Dying:
    """A file that ends its process when it is written to."""

    def __init__(self, stream):
        self.stream = stream

    def __getattr__(self, name):
        return getattr(self.stream, name)

    def write(self, data):
        self.stream.write(bytes(data)[:1000])
        self.stream.flush()
        os._exit(9)


def write_second(url, how, end):
    """Write a checkpoint, and fail with the second."""
    state = {"model.weight": torch.randn(200_000)}
    write_checkpoint(url, copy_state(state, place(1)))
    if how == "full disk":
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        try:
            write_checkpoint(url, copy_state(state, place(2)))
        except CheckpointError as error:
            end.send(str(error))
        os._exit(0)
    create = FileSystem.create_stream

    @contextlib.contextmanager
    def dying(self, path, mode):
        with create(self, path, mode) as stream:
            yield Dying(stream)

    FileSystem.create_stream = dying
    write_checkpoint(url, copy_state(state, place(2)))


def child(url, how):
    """The exit code of a process that writes two checkpoints, and what it said."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=write_second, args=(url, how, theirs), daemon=True)
    process.start()
    theirs.close()
    process.join(60)
    return process.exitcode, ours.recv() if process.exitcode == 0 else ""


def check_killed(tmp_path, url):
    assert child(url, "kill")[0] == 9
    assert len(list(tmp_path.iterdir())) == 2
    assert checkpoint.completed(url) == [1]
    # The next one to write clears up after the dead.
    write_checkpoint(url, Copied(place=place(3), shares=local_shards({"model.weight": torch.ones(2)})))
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["step-1", "step-3"]


def test_killed_while_writing_leaves_nothing_that_is_picked_up(tmp_path):
    check_killed(tmp_path, str(tmp_path))


def test_a_checkpoint_of_another_run_is_refused_with_both_names(model, kit, tmp_path):
    trainer = kit.make_trainer(model)
    path = write_checkpoint(str(tmp_path), copy_state(trainer.state(), place(1)))
    restore(trainer, path, no_stage, run_id="r")
    with pytest.raises(CheckpointError, match=r"step-1 is of run 'r', and 'other' goes on; give each run"):
        restore(trainer, path, no_stage, run_id="other")


def test_what_only_looks_half_written_is_left_alone(model, kit, tmp_path):
    stray = tmp_path / f".step-2@{platform.node()}@mine"
    stray.mkdir()
    write_checkpoint(str(tmp_path), copy_state(kit.make_trainer(model).state(), place(3)))
    assert stray.is_dir()
