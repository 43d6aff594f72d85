import os
import signal
import threading
from unittest.mock import Mock

import pytest

import cosmos_core as cosmos
from cosmos_core.api import start
from cosmos_core.api.run import Run
from cosmos_core.errors import ConfigError, PluginNotFoundError, ReplicaError
from cosmos_core.run import folder
from tests.processes import ForkedCommandLine
from tests.runs import RECIPE as ARITHMETIC

RECIPE = {"run": {"name": "r", "steps": 2}, "model": {"path": "m"}, "dataset": {"plugin": "arithmetic"}}

COMPLETE = {"algorithm": "grpo", "reward": "math", "policy__optimizer__lr": 1e-6}


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_what_is_wrong_with_a_recipe_is_raised_at_once(tmp_path):
    with pytest.raises(ConfigError, match="algorithm: required"):
        cosmos.train(RECIPE)
    with pytest.raises(ConfigError, match=r"\(model__path=FOLDER\), or give a config"):
        cosmos.train(RECIPE | {"model": {"plugin": "hf"}}, **COMPLETE)
    run = tmp_path / "runs" / "r"
    run.mkdir(parents=True)
    (run / "job.json").write_text("{}")
    told = "go on with it: cosmos run --resume runs/r, replace it: overwrite=True, or choose another run__name$"
    with pytest.raises(ConfigError, match=told):
        cosmos.train(RECIPE, **COMPLETE)
    with pytest.raises(ConfigError, match=r"policy\.replica: unknown option; did you mean replicas"):
        cosmos.train(RECIPE, algorithm="grpo", policy__replica=2)
    with pytest.raises(ConfigError, match=r"no\.toml: no such recipe"):
        cosmos.plan("no.toml")
    with pytest.raises(ConfigError, match="not a function or class"):
        cosmos.train(RECIPE, algorithm="grpo", reward=[lambda completion: 1.0])
    with pytest.raises(ConfigError, match="not the folder of a run"):
        cosmos.open("runs/none")
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        cosmos.trian(RECIPE)


def test_what_planning_finds_is_raised_too(tmp_path):
    recipe = "run = { name = 'r', steps = 1 }\nmodel = { path = 'm' }\ndataset = { plugin = 'arithmetic' }\n"
    recipe += "policy = { optimizer = { lr = 1e-6 } }\n"
    (tmp_path / "r.toml").write_text(recipe)
    with pytest.raises(PluginNotFoundError, match="no algorithm plugin named 'no-such'"):
        cosmos.train(tmp_path / "r.toml", algorithm="no-such", reward="math", run={"name": "other"})
    assert not (tmp_path / "runs").exists()


def test_ctrl_c_while_it_is_planned_leaves_nothing(tmp_path, monkeypatch):
    begun = start._begun

    def seen(*arguments, **options):
        found = begun(*arguments, **options)
        timer.start()
        return found

    monkeypatch.setattr(start, "_begun", seen)
    for begin in (cosmos.train, cosmos.plan):
        timer = threading.Timer(1.5, os.kill, (os.getpid(), signal.SIGINT))
        try:
            with pytest.raises(KeyboardInterrupt):
                begin(ARITHMETIC)
        finally:
            timer.cancel()
    assert not ForkedCommandLine(tmp_path).left_behind()
    assert not list(tmp_path.iterdir())


def test_a_stop_is_told_by_the_summary_where_there_is_one(tmp_path):
    def wait():
        return Run(tmp_path, Mock(is_quiet=False, wait=Mock(return_value=True))).wait()

    assert wait() == "stopped"
    assert "it had not begun" in repr(Run(tmp_path))
    folder.write_json(tmp_path / folder.SUMMARY, {"outcome": "finished", "steps": 9, "wall_s": 1.0})
    assert wait() == "finished"
    folder.write_json(tmp_path / folder.SUMMARY, {"outcome": "failed", "steps": 3, "wall_s": 1.0, "reason": "lost"})
    with pytest.raises(ReplicaError, match="failed after 3 steps: lost"):
        wait()
