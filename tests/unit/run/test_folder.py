import json
import os
from pathlib import Path

import pytest

from cosmos_core.config.loading import load_job, load_recipe, save_job
from cosmos_core.errors import ConfigError
from cosmos_core.run import folder


def test_a_run_folder_holds_what_every_process_needs(job, tmp_path):
    assets = tmp_path / "staging"
    assets.mkdir()
    (assets / "tokenizer.json").write_text("{}")
    folder.create(job, assets, {"plugins": [{"name": "grpo"}]}, overwrite=False)
    assert load_job(job.directory) == job
    assert load_recipe(job.directory / "recipe.resolved.toml") == job.recipe
    assert (job.assets / "tokenizer.json").read_text() == "{}"
    manifest = json.loads((job.directory / "manifest.json").read_text())
    assert manifest["plugins"] == [{"name": "grpo"}]


def interrupt(_job):
    raise KeyboardInterrupt


def test_a_run_is_replaced_only_when_asked(job, tmp_path, monkeypatch):
    folder.create(job, tmp_path / "none", {}, overwrite=False)
    (job.directory / "summary.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"exists; go on with it: cosmos run --resume .*demo.*--overwrite"):
        folder.create(job, tmp_path / "none", {}, overwrite=False)
    assert (job.directory / "summary.json").exists()
    folder.create(job, tmp_path / "none", {}, overwrite=True)
    assert not (job.directory / "summary.json").exists()

    # One that is interrupted while it is made is gone.
    monkeypatch.setattr(folder, "save_job", interrupt)
    with pytest.raises(KeyboardInterrupt):
        folder.create(job, tmp_path / "none", {}, overwrite=True)
    monkeypatch.undo()
    assert not job.directory.exists()
    folder.create(job, tmp_path / "none", {}, overwrite=False)

    # A session that has a run is seen, and the run is not replaced.
    save_job(job)
    assert not folder.is_held(job.directory)
    with folder.held(job.directory):
        assert folder.is_held(job.directory)
        with pytest.raises(ConfigError, match="is running now, in another session"):
            folder.create(job, tmp_path / "none", {}, overwrite=True)
    assert not folder.is_held(job.directory)

    # Another session that has found the name free, too, leaves it alone.
    monkeypatch.setattr(folder, "check_free", lambda *_, **__: None)
    with pytest.raises(ConfigError, match=r"could not be made: .*File exists.*; choose another"):
        folder.create(job, tmp_path / "none", {}, overwrite=False)
    assert load_job(job.directory) == job


def test_what_is_no_run_is_never_replaced(job, tmp_path):
    job.directory.mkdir()
    folder.check_free(job.directory, overwrite=False)
    (job.directory / "thesis.tex").write_text("years of work")
    with pytest.raises(ConfigError, match="is not the folder of a run"):
        folder.create(job, tmp_path / "none", {}, overwrite=True)
    assert (job.directory / "thesis.tex").exists()


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="needs a folder that takes no others")
def test_a_folder_that_takes_no_others_is_refused():
    with pytest.raises(ConfigError, match=r"run\.output_dir: /proc cannot be written to: .*; choose another"):
        folder.check_free(Path("/proc/runs/demo"), overwrite=False)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_write_permission_is_refused(job, tmp_path):
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(ConfigError, match=r"run\.output_dir: .* cannot be written to"):
            folder.check_free(job.directory, overwrite=False)
    finally:
        tmp_path.chmod(0o700)


SAID = {"outcome": "stopped", "steps": 3, "wall_s": 2, "samples": 12}


def test_a_summary_is_read_back_and_a_damaged_one_named(tmp_path):
    assert folder.read_summary(tmp_path) is None
    folder.write_json(tmp_path / folder.SUMMARY, SAID)
    assert folder.read_summary(tmp_path) == folder.Ended(outcome="stopped", steps=3, wall_s=2.0)
    (tmp_path / folder.SUMMARY).write_text("{")
    with pytest.raises(ConfigError, match=r"summary\.json: damaged"):
        folder.read_summary(tmp_path)

    # A summary that was changed by hand is refused.
    for content, message in [
        (SAID | {"wall_s": "long"}, r'summary\.json\.wall_s: expected a number, got "long"'),
        ({"outcome": "stopped", "wall_s": 1.0}, r"summary\.json\.steps: required"),
        ([], r"summary\.json: expected a table, got \[\]"),
    ]:
        folder.write_json(tmp_path / folder.SUMMARY, content)
        with pytest.raises(ConfigError, match=message):
            folder.read_summary(tmp_path)
