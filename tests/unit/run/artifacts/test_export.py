"""Which checkpoint is exported, and what becomes of the folder that it is exported to."""

import contextlib

import attrs
import pytest

from cosmos_core.control.journal import Journal
from cosmos_core.control.machine.events import RolledBack
from cosmos_core.errors import CheckpointError, ConfigError, JournalError, StorageError
from cosmos_core.run import folder
from cosmos_core.run.artifacts import export
from cosmos_core.run.artifacts.export import choose_step, export_run


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


def test_latest_is_the_newest_that_was_not_undone(rolled_back, caplog):
    assert choose_step(rolled_back, "latest") == 4
    assert "passed over step 8, which the journal does not know, or which was undone since" in caplog.text


def test_a_number_takes_any_and_nothing_else_does(rolled_back):
    assert choose_step(rolled_back, "8") == 8
    with pytest.raises(CheckpointError, match="no checkpoint of step 5; there are 4, 8"):
        choose_step(rolled_back, "5")
    with pytest.raises(ConfigError, match="'newest' is neither a number"):
        choose_step(rolled_back, "newest")


def test_latest_is_the_newest_that_there_is_where_the_journal_cannot_be_read(rolled_back, caplog):
    rolled_back.journal.write_bytes(b"damaged")
    assert choose_step(rolled_back, "latest") == 8
    assert "whether step 8 was undone since is not known" in caplog.text
    with pytest.raises(JournalError):
        choose_step(rolled_back, "best")


def test_a_run_of_which_nothing_is_left_that_its_journal_knows_is_not_exported(rolled_back, put_checkpoint):
    (rolled_back.directory / "checkpoints" / "step-4" / "complete.json").unlink()
    with pytest.raises(CheckpointError, match="the journal knows none of the complete checkpoints, 8, or their steps"):
        choose_step(rolled_back, "latest")


def test_a_checkpoint_that_is_older_than_what_is_taken_may_be_damaged(rolled_back, put_checkpoint):
    put_checkpoint(rolled_back, 2, 1)
    (rolled_back.directory / "checkpoints" / "step-2" / "complete.json").write_text("damaged")
    assert (choose_step(rolled_back, "latest"), choose_step(rolled_back, "best")) == (4, 4)
    (rolled_back.directory / "checkpoints" / "step-4" / "complete.json").write_text("damaged")
    for step in ("latest", "best"):
        with pytest.raises(CheckpointError, match=r"step-4/complete\.json"):
            choose_step(rolled_back, step)


def test_the_best_is_of_what_the_run_came_to(rolled_back):
    assert choose_step(rolled_back, "best") == 4
    (rolled_back.directory / "checkpoints" / "step-4" / "complete.json").unlink()
    with pytest.raises(CheckpointError, match="step 4 was the best, but is gone; there are none"):
        choose_step(rolled_back, "best")


@pytest.fixture
def made(monkeypatch, tmp_path):
    """What a checkpoint is exported as, without a model: of these files."""
    files = {"config.json": "{}", "model.safetensors": "weights"}

    @contextlib.contextmanager
    def make(job, step, target, *, is_average):
        partial = target.with_name(".partial")
        partial.mkdir(parents=True)
        for name, content in files.items():
            (partial / name).write_text(content)
        yield partial

    monkeypatch.setattr(export, "_made", make)
    return files


def test_an_export_takes_the_place_of_the_one_before_and_of_nothing_else(rolled_back, made, tmp_path):
    target = tmp_path / "model"
    assert export_run(rolled_back.directory, step="4", output=target) == (4, target)
    (target / "notes.md").write_text("mine")
    (target / "tokenizer").mkdir()
    (target / "tokenizer" / "tokenizer.json").write_text("mine too")
    made["other.safetensors"] = made.pop("model.safetensors")
    (tmp_path / ".partial").rmdir()
    export_run(rolled_back.directory, step="4", output=target)
    found = {path.relative_to(target).as_posix() for path in target.rglob("*") if path.is_file()}
    assert found == {*made, ".cosmos-export", "notes.md", "tokenizer/tokenizer.json"}


def test_what_is_no_export_is_refused_before_a_model_is_made(rolled_back, made, tmp_path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.jpg").write_text("mine")
    for name, reason in (("photos", "exists and is no exported model"), ("photos/a.jpg", "exists and is no folder")):
        with pytest.raises(StorageError, match=reason):
            export_run(rolled_back.directory, step="4", output=tmp_path / name)
    assert not (tmp_path / ".partial").exists()
