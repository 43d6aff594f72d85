import importlib.util

import pytest

from cosmos_core.errors import PluginError
from cosmos_core.observe import mlflow as plugin
from cosmos_core.protocols import RunInfo


@pytest.fixture
def run(tmp_path):
    recipe = {
        "run": {"name": "demo"},
        "reward": [{"plugin": "math"}],
        "policy": {"optimizer": {"lr": 1e-3}},
        "empty": {},
    }
    return RunInfo(run_id="demo-1", name="demo", directory=tmp_path, recipe=recipe)


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
    with pytest.raises(PluginError, match=r'needs mlflow.*pip install "cosmos-core\[mlflow\]"'):
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
    for outcome, steps in (("stopped", (1, 2)), ("finished", (3,))):
        tracker = plugin.MlflowTracker(plugin.MlflowOptions(experiment="tests"), run)
        tracker.cosmos_run_started(run)
        for step in steps:
            tracker.cosmos_step_finished(step, {"train/loss": 1.0 / step, "reward/a b?": 0.5})
        tracker.cosmos_evaluation_finished(steps[-1], {"heldout/accuracy": 0.25 * steps[-1]})
        tracker.cosmos_checkpoint_saved(steps[-1], "somewhere")
        tracker.cosmos_run_ended(outcome, {"heldout_accuracy_after": 0.75, "name": "demo"})
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
    assert [path.name for path in tmp_path.iterdir()] == ["mlflow.db"]
