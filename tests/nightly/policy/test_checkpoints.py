"""Checkpoints between layouts, in a bucket whose server goes away, and of processes that are killed."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from cosmos_core.errors import CheckpointError, StorageError
from cosmos_core.policy.checkpoints import checkpoint
from cosmos_core.policy.checkpoints.reader import restore
from cosmos_core.policy.checkpoints.saver import CheckpointSaver
from cosmos_core.storage import told
from cosmos_core.testing.worlds import run_world
from cosmos_core.transport.reports import CheckpointSaved
from tests.unit.policy.checkpoints.test_layouts import check_another_layout, check_another_model, save
from tests.unit.policy.checkpoints.test_saver import check_killed, child
from tests.unit.policy.checkpoints.test_store import URL, place, server, store, trainer, weights

__all__ = ["server", "store", "trainer"]


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [("tp x fsdp", "one"), ("one", "tp x fsdp"), ("hsdp", "pp"), ("pp", "hsdp"), ("tp x fsdp", "hsdp")],
)
def test_a_checkpoint_is_read_in_another_layout(tmp_path, saved, loaded):
    check_another_layout(tmp_path, saved, loaded)


def test_every_process_says_that_a_checkpoint_is_of_another_model(tmp_path):
    check_another_model(tmp_path, "hsdp")


def save_in_the_way(folder):
    try:
        save("hsdp", folder)
    except CheckpointError as error:
        return str(error)
    return ""


def test_a_leader_that_cannot_begin_fails_on_every_process(tmp_path):
    Path(tmp_path, "file").write_text("in the way")
    errors = run_world(4, save_in_the_way, str(tmp_path / "file"))
    assert all("File exists" in error or "Not a directory" in error for error in errors), errors


def test_killed_while_writing_to_a_url(tmp_path):
    check_killed(tmp_path, f"file://{tmp_path}")


def test_a_full_disk_is_told_and_leaves_no_rest(tmp_path):
    code, said = child(str(tmp_path), "full disk")
    assert code == 0
    assert "File too large" in said
    assert "\n" not in said.strip()
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-1"]


def test_what_is_saved_is_restored_though_the_server_was_away(store, trainer, kit, model):
    outcomes = []
    saver = CheckpointSaver(URL, 2, outcomes.append)
    with store.away(5.0):
        start = time.monotonic()
        saver.save(trainer.state(), place(3))
        saver.wait()
        assert time.monotonic() - start > 4.0
    assert outcomes == [CheckpointSaved(step=3, path=f"{URL}/step-3", generation=0)]
    assert checkpoint.completed(URL) == [3]
    resumed = kit.make_trainer(model, seed=5)
    with store.away(1.0):
        restore(resumed, f"{URL}/step-3", lambda index: None)
    assert resumed.step == 3
    for name, tensor in weights(trainer).items():
        assert torch.equal(resumed.state()[name], tensor), name


def test_a_read_is_asked_for_a_few_times_and_no_more(store, monkeypatch):
    files, path = checkpoint.file_system(f"{URL}/part")
    files.pipe_file(path, b"content")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "2")
    files, path = checkpoint.file_system(f"{URL}/part")
    slow = b'<?xml version="1.0"?><Error><Code>SlowDown</Code><Message>Reduce your request rate.</Message></Error>'
    store.fault = lambda method, path: slow
    store.requests.clear()
    with pytest.raises(StorageError, match="request rate"), told(URL):
        files.cat_file(path, start=0, end=3)
    assert len(store.requests) == 2 * 2, "two rounds of two attempts"
