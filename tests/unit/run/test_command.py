"""Going on with a run: what is refused, and that a refusal leaves the run's folder as it was."""

import io
import json
import socket
from pathlib import Path

import attrs
import pytest
from rich.console import Console

from cosmos_core.config.loading import load_job, load_recipe
from cosmos_core.errors import ConfigError, TransportError
from cosmos_core.run import command, folder
from cosmos_core.run.command import resume_run, run_recipe

RECIPE = Path(__file__).parents[3] / "recipes" / "arithmetic.toml"
SETTINGS = ["warmup.steps=3", "run.steps=6", "warmup.optimizer.warmup_steps=0", "tracking.hooks=[]"]


@pytest.fixture
def directory(job, tmp_path):
    """A run that finished after all of its 9 steps."""
    recipe = load_recipe(RECIPE, overrides=SETTINGS)
    folder.create(
        attrs.evolve(job, recipe=recipe), tmp_path / "none", {"plugins": [], "cosmos_core": "0.1.0"}, overwrite=False
    )
    folder.write_json(job.directory / folder.SUMMARY, {"outcome": "finished", "steps": 9, "wall_s": 1.0})
    return job.directory


@pytest.fixture
def begun(monkeypatch):
    """The sessions that began."""
    sessions = []
    monkeypatch.setattr(command, "_supervise", lambda session, *_: sessions.append(session) or "stopped")
    return sessions


def resume(directory, *overrides):
    return resume_run(directory, Console(file=io.StringIO()), overrides=overrides)


def contents(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file() and path.stat().st_size}


def test_a_longer_run_goes_on_and_its_folder_says_so(directory, begun):
    assert resume(directory, "run.steps=8") == "stopped"
    assert begun[0].job == load_job(directory)
    assert load_recipe(directory / "recipe.resolved.toml") == begun[0].job.recipe
    (session,) = json.loads((directory / "manifest.json").read_text())["resumed"]
    assert session["changes"] == ["run.steps was 6, is 8"]


def test_a_longer_run_whose_session_did_not_get_far_can_be_resumed(directory, begun):
    resume(directory, "run.steps=8")
    # The session ended before its controller wrote anything: the summary is still of the shorter run.
    assert resume(directory) == resume(directory, "run.steps=8") == "stopped"
    assert [session.job.recipe.run.steps for session in begun] == [8, 8, 8]


@pytest.mark.parametrize("override", ["run.steps=6", "run.steps=5", "evaluation.interval=7"])
def test_a_finished_run_stays_as_it_is(directory, begun, override):
    before = contents(directory)
    assert resume(directory, override) == "finished"
    assert (begun, contents(directory)) == ([], before)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("tracking={hooks=['mlflow'], options={mlflow={experimant='x'}}}", "experimant: unknown option"),
        ("tracking.hooks=['mlfow']", "mlfow"),
        ("policy.optimizer.lr=1.0", "keeps what its weights"),
    ],
)
def test_what_cannot_begin_changes_nothing(directory, begun, override, message):
    before = contents(directory)
    with pytest.raises(Exception, match=message):
        resume(directory, "run.steps=8", override)
    assert (begun, contents(directory)) == ([], before)


def test_a_port_in_use_changes_nothing(directory, begun):
    before = contents(directory)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(TransportError, match="in use"):
            resume(directory, "run.steps=8", f"control.port={taken.getsockname()[1]}")
    assert (begun, contents(directory)) == ([], before)


def test_two_sessions_at_once_are_refused(directory, begun):
    before = contents(directory)
    recipe = load_job(directory).recipe
    recipe = attrs.evolve(recipe, run=attrs.evolve(recipe.run, output_dir=str(directory.parent), name=directory.name))
    with folder.held(directory):
        with pytest.raises(ConfigError, match="is running now, in another session"):
            resume(directory, "run.steps=8")
        with pytest.raises(ConfigError, match="is running now, in another session"):
            run_recipe(recipe, RECIPE, Console(file=io.StringIO()), overwrite=True)
    assert (begun, contents(directory)) == ([], before)
    assert resume(directory, "run.steps=8") == "stopped"


def test_what_is_no_run_is_not_resumed(tmp_path):
    with pytest.raises(ConfigError, match=r"not the folder of a run \(it has no job\.json\)"):
        resume(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_layout_that_does_not_fit_changes_nothing(directory, begun, monkeypatch):
    def refuse(job):
        assert job.recipe.policy.mesh.tp == 3
        raise ConfigError("3 does not divide")

    monkeypatch.setattr(command, "check_changed", refuse)
    before = contents(directory)
    with pytest.raises(ConfigError, match="3 does not divide"):
        resume(directory, "run.steps=8", "policy.mesh.tp=3")
    assert (begun, contents(directory)) == ([], before)
