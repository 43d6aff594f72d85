"""Which checkpoint is exported, and what becomes of the folder that it is exported to."""

import contextlib
import shutil
from types import SimpleNamespace

import attrs
import pytest
import torch

from cosmos_core.config.loading import save_job
from cosmos_core.config.schema import PolicyConfig
from cosmos_core.control.journal import Journal
from cosmos_core.control.machine.events import RolledBack
from cosmos_core.errors import CheckpointError, ConfigError, JournalError, StorageError
from cosmos_core.policy.checkpoints.frozen_digest import frozen_digest
from cosmos_core.policy.mesh.layout import layout_of
from cosmos_core.policy.processes.world import single_world
from cosmos_core.run import export, folder
from cosmos_core.run.export import Exported, choose_step, export_run
from cosmos_core.run.folder import held


@pytest.fixture
def rolled_back(job, tmp_path, open_history, put_checkpoint):
    """A run taken back from step 8 to step 4 and stopped at step 6, with what was saved of step 8 before still there.

    Its best evaluation is of step 4.
    """
    evaluation = attrs.evolve(job.recipe.evaluation, interval=1)
    job = attrs.evolve(job, recipe=attrs.evolve(job.recipe, evaluation=evaluation))
    folder.create(job, tmp_path / "none", {"plugins": [], "cosmos_core": "0.1.0"}, overwrite=False)
    history = open_history(job)
    history.join()
    for step in (4, 8):
        history.work(until=step)
        put_checkpoint(job, step, history.state.generation_number)
    history.lose("policy-0", "its machine is gone")
    del history.fakes["policy-0"]
    history.append(RolledBack(step=4))
    history.join(roles=("policy",))
    history.work(until=6)
    with Journal(job.journal) as journal:
        for _, _, event in history.entries:
            journal.append(event)
        journal.commit()
    return job


def test_the_checkpoint_is_of_what_the_run_came_to(rolled_back, caplog):
    # Latest is the newest that was not undone.
    assert choose_step(rolled_back, "latest") == 4
    assert "passed over step 8, which the journal does not know, or which was undone since" in caplog.text

    # A number takes any and nothing else does.
    assert choose_step(rolled_back, "8") == 8
    with pytest.raises(CheckpointError, match="no checkpoint of step 5; there are 4, 8"):
        choose_step(rolled_back, "5")
    with pytest.raises(ConfigError, match="'newest' is neither a number"):
        choose_step(rolled_back, "newest")

    # The best is of what the run came to.
    assert choose_step(rolled_back, "best") == 4
    (rolled_back.directory / "checkpoints" / "step-4" / "complete.json").unlink()
    with pytest.raises(CheckpointError, match="step 4 was the best, but is gone; there are none"):
        choose_step(rolled_back, "best")

    # Latest is the newest that there is where the journal cannot be read.
    rolled_back.journal.write_bytes(b"damaged")
    assert choose_step(rolled_back, "latest") == 8
    assert "the newest checkpoint is taken, of step 8; whether it was undone since is not known: " in caplog.text
    caplog.clear()
    with held(rolled_back.directory):
        assert choose_step(rolled_back, "latest") == 8
    assert caplog.messages == [f"{rolled_back.directory}: the newest checkpoint is taken, of step 8; the run goes on"]
    with pytest.raises(JournalError):
        choose_step(rolled_back, "best")


def test_damaged_checkpoints_are_told_where_they_are_taken(rolled_back, put_checkpoint):
    # A checkpoint that is older than what is taken may be damaged.
    put_checkpoint(rolled_back, 2, 1)
    (rolled_back.directory / "checkpoints" / "step-2" / "complete.json").write_text("damaged")
    assert (choose_step(rolled_back, "latest"), choose_step(rolled_back, "best")) == (4, 4)
    (rolled_back.directory / "checkpoints" / "step-4" / "complete.json").write_text("damaged")
    for step in ("latest", "best"):
        with pytest.raises(CheckpointError, match=r"step-4/complete\.json"):
            choose_step(rolled_back, step)

    # A run of which nothing is left that its journal knows is not exported.
    shutil.rmtree(rolled_back.directory / "checkpoints" / "step-2")
    (rolled_back.directory / "checkpoints" / "step-4" / "complete.json").unlink()
    with pytest.raises(CheckpointError, match="the journal knows none of the complete checkpoints, 8, or their steps"):
        choose_step(rolled_back, "latest")


@pytest.fixture
def made(monkeypatch, tmp_path):
    """What a checkpoint is exported as, without a model: of these files."""
    files = {"config.json": "{}", "model.safetensors": "weights"}

    @contextlib.contextmanager
    def make(job, step, target, *, is_average, dtype):
        partial = target.with_name(".partial")
        partial.mkdir(parents=True)
        for name, content in files.items():
            (partial / name).write_text(content)
        yield partial, ["bfloat16"]

    monkeypatch.setattr(export, "_made", make)
    return files


def test_an_export_takes_the_place_of_the_one_before_and_of_nothing_else(rolled_back, made, tmp_path):
    target = tmp_path / "model"
    assert export_run(rolled_back.directory, step="4", output=target) == Exported(
        step=4, place=target, dtypes=["bfloat16"]
    )
    (target / "notes.md").write_text("mine")
    (target / "tokenizer").mkdir()
    (target / "tokenizer" / "tokenizer.json").write_text("mine too")
    made["other.safetensors"] = made.pop("model.safetensors")
    (tmp_path / ".partial").rmdir()
    export_run(rolled_back.directory, step="4", output=target)
    (tmp_path / ".partial").rmdir()
    found = {path.relative_to(target).as_posix() for path in target.rglob("*") if path.is_file()}
    assert found == {*made, ".cosmos-export", "notes.md", "tokenizer/tokenizer.json"}

    # A template of chats would mislead who does not see that the run learned from plain prompts.
    made["chat_template.jinja"] = "{}"
    save_job(attrs.evolve(rolled_back, is_plain=True))
    for place, has_note in ((target, True), (None, False)):
        exported = export_run(rolled_back.directory, step="4", output=place)
        assert ("--plain" in exported.note) is has_note
    (tmp_path / ".partial").rmdir()

    # What is no export is refused before a model is made.
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.jpg").write_text("mine")
    for name, reason in (("photos", "exists and is no exported model"), ("photos/a.jpg", "exists and is no folder")):
        with pytest.raises(StorageError, match=reason):
            export_run(rolled_back.directory, step="4", output=tmp_path / name)
    with pytest.raises(ConfigError, match=r"--dtype: 'bf16' is no dtype of exports; did you mean bfloat16\?"):
        export_run(rolled_back.directory, step="4", output=target, dtype="bf16")
    assert not (tmp_path / ".partial").exists()


def test_adapters_are_exported_on_the_weights_that_they_were_trained_with_alone(rolled_back, monkeypatch, tmp_path):
    layout = layout_of(PolicyConfig(), single_world().mesh, "cpu")
    module = torch.nn.Linear(3, 2).requires_grad_(requires_grad=False)

    def write(_, place, *, dtype):
        assert dtype is torch.float16
        (place / "config.json").write_text("{}")
        return [dtype, torch.float32]

    model = SimpleNamespace(build=lambda **_: module, export=write)
    below = frozen_digest(module, 0, lambda said: [said])
    monkeypatch.setattr(export, "load_model", lambda *_: model)
    monkeypatch.setattr(export, "_adapted", lambda _: layout)
    monkeypatch.setattr(export, "load_weights", lambda *_, **__: None)
    monkeypatch.setattr(export, "read_place", lambda _: SimpleNamespace(below=below))
    made = export_run(rolled_back.directory, step="4", output=tmp_path / "model", dtype="float16")
    assert made.dtypes == ("float16", "float32")
    module.weight[0, 0] += 1
    with pytest.raises(CheckpointError, match=rf"adapters for other weights than those of .*: their digest is {below}"):
        export_run(rolled_back.directory, step="4", output=tmp_path / "other")
    assert not (tmp_path / "other").exists()
