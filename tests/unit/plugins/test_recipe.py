from pathlib import Path

import attrs
import fsspec
import pytest

from cosmos_core.config import Job
from cosmos_core.config.job import StageFacts, stages
from cosmos_core.config.loading import recipe_from
from cosmos_core.errors import ConfigError, StorageError
from cosmos_core.plugins.recipe import (
    load_algorithm,
    load_dataset,
    load_model,
    load_rewards,
    selections,
    source_of,
)
from cosmos_core.plugins.selection import PluginSet

PLUGIN = """
import attrs
from cosmos_core.protocols import AlgorithmCapabilities, Provider, hookimpl

@attrs.frozen(kw_only=True)
class Options:
    x: int = 0

def make(options, context):
    return options, context
"""
ENTRIES = """
[cosmos_core.models]
m = acme.model
[cosmos_core.algorithms]
a = acme.algorithm
s = acme.supervised
[cosmos_core.rewards]
r = acme.reward
q = acme.reward
[cosmos_core.datasets]
d = acme.dataset
"""
RECIPE = {
    "run": {"name": "a", "steps": 3, "seed": 5},
    "model": {"plugin": "m", "path": "weights", "options": {"x": 1}},
    "algorithm": {"plugin": "a", "options": {"x": 2}},
    "policy": {"optimizer": {"lr": 1e-6}},
    "dataset": {"plugin": "d", "options": {"x": 3}},
    "reward": [{"plugin": "r", "options": {"x": 4}}, {"plugin": "q"}],
    "warmup": {"optimizer": {"lr": 1e-6}, "plugin": "s", "steps": 2, "options": {"x": 6}},
    "sync": {"mode": "sync"},
    "rollout": {"group_size": 4, "sampling": {"temperature": 0.7, "max_units": 9}},
    "tracking": {"hooks": ["mlflow"]},
}


def provider(kind: str, capabilities: str = "None") -> str:
    return (
        f"{PLUGIN}\n@hookimpl\ndef cosmos_{kind}():\n"
        f"    return Provider(create=make, options=Options, capabilities={capabilities})\n"
    )


@pytest.fixture
def plugins(make_distribution) -> PluginSet:
    modules = {
        "acme/__init__.py": "",
        "acme/model.py": provider("model"),
        "acme/algorithm.py": provider("algorithm"),
        "acme/supervised.py": provider("algorithm", "AlgorithmCapabilities(source='demonstrations')"),
        "acme/reward.py": provider("reward"),
        "acme/dataset.py": provider("dataset"),
    }
    make_distribution("acme", entries=ENTRIES, modules=modules)
    return PluginSet.load(selections(recipe_from(RECIPE), ("model", "algorithm", "reward", "dataset")))


def make_job(tmp_path: Path, **changes) -> Job:
    return Job(
        run_id="id",
        directory=tmp_path / "run",
        recipe_directory=tmp_path,
        recipe=recipe_from({**RECIPE, **changes}),
        num_train_rows=10,
        num_heldout_rows=4,
        num_evaluation_prompts=4,
        uses_rollouts=True,
        stages=(StageFacts(source="demonstrations"), StageFacts(source="rollouts")),
    )


def test_a_recipe_names_its_plugins_once_each():
    assert selections(recipe_from(RECIPE)) == (
        ("model", "m"),
        ("algorithm", "a"),
        ("dataset", "d"),
        ("reward", "r"),
        ("reward", "q"),
        ("algorithm", "s"),
        ("engine", "embedded"),
        ("hook", "mlflow"),
        ("launcher", "local"),
    )
    assert selections(recipe_from(RECIPE), ("engine",)) == (("engine", "embedded"),)
    talking = recipe_from({**RECIPE, "environment": {"plugin": "game"}})
    assert selections(talking, ("environment",)) == (("environment", "game"),)
    assert selections(recipe_from(RECIPE), ("environment",)) == ()


def test_the_model_gets_what_the_recipe_says_and_the_folder_beside_it(plugins, tmp_path):
    options, context = load_model(make_job(tmp_path), plugins)
    assert (options.x, context.path, context.config) == (1, "weights", None)
    assert context.assets == tmp_path / "run" / "assets"
    (tmp_path / "weights").mkdir()
    _, context = load_model(make_job(tmp_path), plugins)
    assert context.path == str(tmp_path / "weights")


def test_a_model_folder_in_the_home_is_found(plugins, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home" / "weights").mkdir(parents=True)
    job = make_job(tmp_path)
    model = attrs.evolve(job.recipe.model, path="~/weights")
    _, context = load_model(attrs.evolve(job, recipe=attrs.evolve(job.recipe, model=model)), plugins)
    assert context.path == str(tmp_path / "home" / "weights")


def test_a_model_in_a_store_is_copied_once_it_is_whole(plugins, tmp_path, monkeypatch):
    monkeypatch.setenv("COSMOS_CACHE", str(tmp_path / "cache"))
    job = make_job(tmp_path)
    model = attrs.evolve(job.recipe.model, path="memory://models/one")
    stored = attrs.evolve(job, recipe=attrs.evolve(job.recipe, model=model))
    files = fsspec.filesystem("memory")
    files.pipe_file("/models/one/model.safetensors", b"weights")
    with pytest.raises(StorageError, match="memory://models/one is no whole model: it has 1 files, and neither config"):
        load_model(stored, plugins)
    files.pipe_file("/models/one/config.json", b"{}")
    _, context = load_model(stored, plugins)
    assert context.path.startswith(str(tmp_path / "cache"))
    assert (Path(context.path) / "model.safetensors").read_bytes() == b"weights"
    files.store.clear()


def test_the_dataset_and_the_rewards_get_what_the_recipe_says(plugins, tmp_path):
    options, context = load_dataset(make_job(tmp_path), plugins)
    assert (options.x, context.seed, context.directory) == (3, 5, tmp_path)
    (first, one), (second, other) = load_rewards(make_job(tmp_path), plugins)
    assert (first.x, one.name, one.seed) == (4, "r", 5)
    assert (second.x, other.name) == (0, "q")


def test_each_stage_gets_an_algorithm_of_its_own(plugins, tmp_path):
    job = make_job(tmp_path)
    warmup, main = stages(job.recipe)
    assert [source_of(plugins, stage) for stage in (warmup, main)] == ["demonstrations", "rollouts"]
    options, context = load_algorithm(job, plugins, warmup)
    assert (options.x, context.group_size) == (6, 1)
    options, context = load_algorithm(job, plugins, main)
    assert (options.x, context.group_size, context.temperature, context.max_units) == (2, 4, 0.7, 9)
    assert context.max_staleness == 0
    assert not context.generates_average
    averaging = make_job(tmp_path, policy={"optimizer": {"lr": 1e-6}, "average": {"publish": True}})
    assert load_algorithm(averaging, plugins, main)[1].generates_average


def test_a_wrong_option_is_named_by_its_path_in_the_recipe(plugins, tmp_path):
    for changes, load, path in [
        ({"model": {**RECIPE["model"], "options": {"y": 1}}}, load_model, "model.options.y"),
        ({"dataset": {"plugin": "d", "options": {"y": 1}}}, load_dataset, "dataset.options.y"),
        ({"reward": [{"plugin": "q"}, {"plugin": "r", "options": {"y": 1}}]}, load_rewards, "reward.1.options.y"),
    ]:
        with pytest.raises(ConfigError, match=f"^{path}: unknown option"):
            load(make_job(tmp_path, **changes), plugins)
    job = make_job(
        tmp_path,
        warmup={"optimizer": {"lr": 1e-6}, "plugin": "s", "steps": 1, "options": {"y": 1}},
        algorithm={"plugin": "a", "options": {"y": 1}},
    )
    for stage, path in zip(stages(job.recipe), ("warmup.options.y", "algorithm.options.y"), strict=True):
        with pytest.raises(ConfigError, match=f"^{path}: unknown option"):
            load_algorithm(job, plugins, stage)
