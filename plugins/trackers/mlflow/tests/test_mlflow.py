import importlib.util
import json
import subprocess
import sys

import attrs
import pytest

from cosmos_core.errors import PluginError
from cosmos_core.protocols import RunInfo
from cosmos_core.rollout.samples import schema
from cosmos_tracker_mlflow import plugin


@pytest.fixture
def run(tmp_path):
    recipe = {
        "run": {"name": "demo"},
        "reward": [{"plugin": "math"}],
        "policy": {"optimizer": {"lr": 1e-3}},
        "empty": {},
    }
    return RunInfo(run_id="demo-1", name="demo", directory=tmp_path, recipe=recipe)


def keep_samples(directory, rewards, *, time=False):
    """Write samples with these rewards, by lease, as a run keeps them; finished in the order of leases if `time`."""
    import pyarrow as pa
    from pyarrow import parquet

    texts = {"prompt": "2+2?", "reference": "4", "metadata": "{}", "completion": "4" * 5000, "media": "", "detail": ""}
    told = {"purpose": "train", "status": "ok", "drop": "", "newest_version": 1, "row": 0, "position": 0}
    rows = [
        {
            **texts,
            **told,
            "time": float(lease * time),
            "lease": lease,
            "index": index,
            "reward": reward,
            "rewards": [("math", reward)],
        }
        for lease, each in rewards.items()
        for index, reward in enumerate(each)
    ]
    (directory / "samples").mkdir()
    parquet.write_table(pa.Table.from_pylist(rows, schema()), directory / "samples" / "samples.rollout-0.1.parquet")


def test_flatten_names_every_leaf():
    tree = {"a": {"b": 1, "c": {}}, "rewards": [{"plugin": "math"}], "betas": [0.9, 0.99]}
    assert dict(plugin.flatten(tree)) == {
        "a.b": "1",
        "a.c": "{}",
        "rewards.0.plugin": "math",
        "betas": "[0.9, 0.99]",
    }


def test_without_mlflow_the_provider_says_what_to_install(monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "mlflow" else found(name))
    with pytest.raises(PluginError, match=r"needs mlflow.*pip install mlflow"):
        plugin.cosmos_hook()


def test_nothing_is_logged_before_the_run_starts(run):
    tracker = plugin.MlflowTracker(plugin.MlflowOptions(), run)
    tracker.cosmos_step_finished(1, {"loss": 1.0})
    tracker.cosmos_run_ended("failed", {})
    assert list(run.directory.iterdir()) == []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # those of mlflow and its many dependencies are not ours to mend
def test_a_run_is_logged_and_a_resumed_one_goes_on_in_it(run, monkeypatch, tmp_path):
    pytest.importorskip("mlflow", reason="the mlflow tracker needs mlflow")
    monkeypatch.chdir(tmp_path)
    longer = attrs.evolve(run, recipe={**run.recipe, "run": {"name": "demo", "steps": 9}})
    for session, outcome, steps in ((run, "stopped", (1, 2)), (longer, "finished", (3,))):
        tracker = plugin.MlflowTracker(plugin.MlflowOptions(experiment="tests"), session)
        tracker.cosmos_run_started(session)
        for step in steps:
            tracker.cosmos_step_finished(step, {"train/loss": 1.0 / step, "reward/a b?": 0.5})
        tracker.cosmos_evaluation_finished(steps[-1], {"heldout/accuracy": 0.25 * steps[-1]})
        tracker.cosmos_checkpoint_saved(steps[-1], "somewhere")
        text = tracker.cosmos_run_ended(outcome, {"heldout_accuracy_after": 0.75, "name": "demo"})
        assert text == f"MLflow: mlflow ui --backend-store-uri sqlite:///{run.directory / 'mlflow.db'}"
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{run.directory / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("tests")
    (logged,) = client.search_runs([experiment.experiment_id])
    assert logged.info.status == "FINISHED"
    assert logged.data.params["policy.optimizer.lr"] == "0.001"
    assert logged.data.params["reward.0.plugin"] == "math"
    history = client.get_metric_history(logged.info.run_id, "train/loss")
    assert [(metric.step, metric.value) for metric in history] == [(1, 1.0), (2, 0.5), (3, 1.0 / 3)]
    assert logged.data.metrics["reward/a b_"] == 0.5
    assert logged.data.metrics["heldout/accuracy"] == 0.75
    assert logged.data.tags["cosmos.checkpoint_step"] == "3"
    changed = {name: value for name, value in logged.data.tags.items() if name.startswith("cosmos.changed.")}
    assert changed == {"cosmos.changed.run.steps": "9"}
    assert logged.data.tags["cosmos.samples"] == f"{run.directory}: not the folder of a run"
    assert [path.name for path in tmp_path.iterdir()] == ["mlflow.db"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_run_that_has_ended_has_a_table_of_samples_in_its_folder(run, monkeypatch, tmp_path):
    pytest.importorskip("mlflow", reason="the mlflow tracker needs mlflow")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    (run.directory / "job.json").touch()
    tracker = plugin.MlflowTracker(plugin.MlflowOptions(experiment="tests"), run)
    tracker.cosmos_run_started(run)
    keep_samples(run.directory, {1: [0.5, 1.0], 2: [0.25] * 20})
    tracker.cosmos_run_ended("finished", {"steps": 7})
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{run.directory / 'mlflow.db'}")
    (logged,) = client.search_runs([client.get_experiment_by_name("tests").experiment_id])
    assert [artifact.path for artifact in client.list_artifacts(logged.info.run_id)] == ["samples-step-7.json"]
    (path,) = (run.directory / "mlartifacts").rglob("samples-step-7.json")
    table = json.loads(path.read_text())
    rows = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
    assert [(row["lease"], row["reward"], row["order"]) for row in rows[1:3]] == [
        (1, 1.0, "newest"),
        (2, 0.25, "newest"),
    ]
    assert (len(rows), len(rows[0]["completion"]), rows[0]["rewards"]) == (18, 2000, '{"math": 0.5}')
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_the_table_has_the_newest_the_worst_and_the_best(run, monkeypatch):
    monkeypatch.setattr(plugin, "_TABLED", 1)
    (run.directory / "job.json").touch()
    keep_samples(run.directory, {1: [0.0, 0.25], 2: [0.5], 3: [1.0], 4: [0.5], 5: [0.5]}, time=True)
    table = plugin.samples_table(run.directory)
    assert dict(zip(table["lease"], table["order"], strict=True)) == {5: "newest", 1: "worst", 3: "best"}
    assert table["reward"] == [0.0, 0.25, 1.0, 0.5]


FULL = """
import pathlib, sqlite3, sys, warnings
warnings.simplefilter("ignore")
from cosmos_core.errors import PluginError
from cosmos_tracker_mlflow import plugin
from cosmos_core.protocols import RunInfo
from sqlalchemy import event
from sqlalchemy.engine import Engine

run = RunInfo(run_id="demo-1", name="demo", directory=pathlib.Path(sys.argv[1]), recipe={})
tracker = plugin.MlflowTracker(plugin.MlflowOptions(experiment="tests"), run)
tracker.cosmos_run_started(run)
size = sqlite3.connect(run.directory / "mlflow.db").execute("PRAGMA page_count").fetchone()[0]

@event.listens_for(Engine, "checkout")
def limit(connection, *_):
    connection.execute(f"PRAGMA max_page_count = {size}")  # as a full disk would

try:
    for step in range(500):
        tracker.cosmos_step_finished(step, {f"train/{name}": 1.0 for name in range(50)})
    tracker.cosmos_run_ended("finished", {})
except PluginError as error:
    print(error)
"""


@pytest.mark.nightly
def test_a_full_disk_is_one_line(tmp_path):
    pytest.importorskip("mlflow", reason="the mlflow tracker needs mlflow")
    done = subprocess.run(
        [sys.executable, "-c", FULL, tmp_path], capture_output=True, text=True, check=True, timeout=90
    )
    assert done.stdout == f"sqlite:///{tmp_path}/mlflow.db cannot be written: database or disk is full\n"
    assert "Traceback" not in done.stderr


def test_names_of_metrics_are_made_paths_that_mlflow_takes(subtests):
    for name, allowed in [
        ("rewards/math", "rewards/math"),
        ("a b/§", "a b/_"),
        ("/a//../.", "_/a/_/__/_"),
        ("", "_"),
        ("x" * 251, "x" * 241 + "-90d738c3"),
    ]:
        with subtests.test(name=name, allowed=allowed):
            assert plugin._allowed(name) == allowed
