import json
import os
from pathlib import Path

import attrs
import pytest

from cosmos_core.config import Job
from cosmos_core.config.job import StageFacts
from cosmos_core.config.loading import DEFAULT_STEPS, load_job, load_recipe, recipe_from, save_job
from cosmos_core.errors import ConfigError

RECIPE = """
[run]
name = "demo"
steps = 5
[model]
path = "model"
[algorithm]
plugin = "grpo"
options = { epsilon = 0.2 }
[policy.optimizer]
lr = 1e-6
[dataset]
plugin = "arithmetic"
[[reward]]
plugin = "math"
"""
GIVEN = ("model.path=x", "policy.optimizer.lr=1e-6")


@pytest.fixture
def recipe_file(tmp_path: Path) -> Path:
    path = tmp_path / "demo.toml"
    path.write_text(RECIPE)
    return path


def make_job(directory: Path) -> Job:
    data = {
        "run": {"name": "a", "steps": 3},
        "model": {"path": "m"},
        "algorithm": {"plugin": "grpo"},
        "policy": {"optimizer": {"lr": 1e-6}},
        "dataset": {"plugin": "arithmetic"},
    }
    return Job(
        run_id="id",
        directory=directory,
        recipe_directory=Path("recipes"),
        recipe=recipe_from(data),
        num_train_rows=10,
        num_heldout_rows=4,
        num_evaluation_prompts=4,
        uses_rollouts=True,
        stages=(StageFacts(source="rollouts", min_group_size=2),),
    )


def test_a_job_of_an_earlier_release_measures_what_it_did(tmp_path):
    for uses_rollouts, expected in ((True, 0), (False, 4)):
        save_job(attrs.evolve(make_job(tmp_path), uses_rollouts=uses_rollouts, num_measured_prompts=1))
        assert load_job(tmp_path).num_measured_prompts == 1
        data = json.loads((tmp_path / "job.json").read_text())
        del data["num_measured_prompts"], data["checksum"]
        (tmp_path / "job.json").write_text(json.dumps(data | {"rows": "1f"}))
        assert (load_job(tmp_path).num_measured_prompts, load_job(tmp_path).row_digests) == (expected, ())


def test_a_file_with_overrides_and_selections(recipe_file):
    recipe = load_recipe(
        recipe_file,
        overrides=["policy.replicas=2", "reward.0.weight=2", "run.name=other"],
        selections={"dataset": "jsonl"},
    )
    assert (recipe.policy.replicas, recipe.reward[0].weight, recipe.run.name) == (2, 2.0, "other")
    assert recipe.dataset.plugin == "jsonl"
    assert recipe.algorithm.options == {"epsilon": 0.2}


def test_a_later_override_wins_over_selections_and_earlier_ones(recipe_file):
    recipe = load_recipe(
        recipe_file, overrides=["algorithm.plugin=b", "algorithm.plugin=c"], selections={"algorithm": "a"}
    )
    assert recipe.algorithm.plugin == "c"


def test_an_unknown_key_of_an_override_names_the_nearest(recipe_file):
    with pytest.raises(ConfigError, match=r"policy.replcas: unknown option; did you mean replicas\?"):
        load_recipe(recipe_file, overrides=["policy.replcas=2"])
    with pytest.raises(ConfigError, match=r"polcy: unknown option; did you mean policy\?"):
        load_recipe(recipe_file, overrides=["polcy.replicas=2"])
    with pytest.raises(ConfigError, match=r"policy.lerning_rate: unknown option; did you mean policy.optimizer.lr\?"):
        load_recipe(recipe_file, overrides=["policy.lerning_rate=1e-6"])
    with pytest.raises(ConfigError, match=r"^checkpoint: unknown option; did you mean policy.checkpoint\?$"):
        load_recipe(recipe_file, overrides=["checkpoint.interval=20"])


def test_names_alone_make_a_recipe():
    recipe = load_recipe(
        None,
        overrides=GIVEN,
        selections={"model": "qwen", "algorithm": "cosmos-algorithm-grpo:grpo", "dataset": "jsonl", "reward": "math"},
    )
    assert recipe.run.name == "grpo-jsonl"
    assert recipe.run.steps == DEFAULT_STEPS
    assert [reward.plugin for reward in recipe.reward] == ["math"]


def test_without_a_recipe_what_was_given_stays():
    selections = {"algorithm": "grpo", "dataset": "jsonl"}
    recipe = load_recipe(None, overrides=[*GIVEN, "run.steps=3", "run.name=mine"], selections=selections)
    assert (recipe.run.steps, recipe.run.name) == (3, "mine")


def test_without_anything_the_error_says_what_is_required():
    with pytest.raises(ConfigError) as caught:
        load_recipe(None)
    text = str(caught.value)
    assert all(
        f"{key}: required" in text for key in ("run.name", "model", "algorithm", "dataset", "policy.optimizer.lr")
    )


def test_a_learning_rate_has_to_be_said_and_to_be_above_0(recipe_file):
    said = recipe_file.read_text()
    for table, absent in [("policy.optimizer", ""), ("policy.optimizer", "[policy]"), ("warmup.optimizer", said)]:
        recipe_file.write_text(absent if absent != "[policy]" else said.replace("lr = 1e-6", ""))
        overrides = ["warmup.plugin=sft", "warmup.steps=2"] if table.startswith("warmup") else []
        with pytest.raises(
            ConfigError, match=rf"{table}\.lr: required, but not given\. .* 1e-6 for RL of a pretrained"
        ):
            load_recipe(recipe_file, overrides=overrides)
    recipe_file.write_text(said)
    with pytest.raises(ConfigError, match=r"^policy\.optimizer\.lr: must be > 0\.0, got 0\.0$"):
        load_recipe(recipe_file, overrides=["policy.optimizer.lr=0"])


def test_a_missing_file_names_a_similar_one(recipe_file, monkeypatch):
    with pytest.raises(ConfigError, match=r"no such recipe; did you mean .*demo\.toml\?"):
        load_recipe(recipe_file.with_name("dmeo.toml"))
    with pytest.raises(ConfigError, match=r"the folder .* does not exist"):
        load_recipe(recipe_file.parent / "nowhere" / "demo.toml")
    monkeypatch.chdir(recipe_file.parent)
    for shipped in ("arithmetic", "arithmetic.toml", "recipes/arithmetic.toml"):
        with pytest.raises(ConfigError, match=r"no such recipe; `cosmos recipes copy arithmetic` writes the one of"):
            load_recipe(Path(shipped))


def test_a_syntax_error_shows_its_line(recipe_file):
    recipe_file.write_text("[run]\nname = demo\n")
    with pytest.raises(ConfigError, match=r"not valid TOML: .*line 2") as caught:
        load_recipe(recipe_file)
    assert "2 | name = demo" in str(caught.value)


def test_a_file_that_is_no_toml(recipe_file, subtests):
    for content, message in [(b"\xff\xfe", "not UTF-8"), (b"[run", "not valid TOML")]:
        with subtests.test(content=content):
            recipe_file.write_bytes(content)
            with pytest.raises(ConfigError, match=message):
                load_recipe(recipe_file)


def test_a_folder_is_no_recipe(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        load_recipe(tmp_path)


def test_a_job_survives_its_file(tmp_path):
    job = make_job(tmp_path / "run")
    assert save_job(job) == tmp_path / "run" / "job.json"
    assert load_job(tmp_path / "run") == job


def test_a_moved_run_is_where_it_is_now(tmp_path):
    save_job(make_job(tmp_path / "run"))
    (tmp_path / "run").rename(tmp_path / "moved")
    assert load_job(tmp_path / "moved").directory == tmp_path / "moved"


def test_who_reads_while_a_job_is_saved_reads_the_old_one(tmp_path):
    path = save_job(make_job(tmp_path))
    with path.open() as file:
        save_job(attrs.evolve(make_job(tmp_path), run_id="new"))
        assert json.load(file)["run_id"] == "id"
    assert load_job(tmp_path).run_id == "new"


def test_a_crash_while_saving_leaves_the_old_job(tmp_path, monkeypatch):
    job = make_job(tmp_path / "run")
    save_job(job)

    def crash(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", crash)
    with pytest.raises(ConfigError, match="No space left"):
        save_job(attrs.evolve(job, run_id="new"))
    assert load_job(tmp_path / "run") == job
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["job.json"]


def test_a_folder_without_a_job_is_no_run(tmp_path):
    with pytest.raises(ConfigError, match="not the folder of a run"):
        load_job(tmp_path)


def test_a_damaged_job_is_named(tmp_path):
    path = save_job(make_job(tmp_path))
    whole = path.read_text()
    path.write_text(whole[:-20])
    with pytest.raises(ConfigError, match="damaged"):
        load_job(tmp_path)
    for content in ("{}", "[]", "3"):
        path.write_text(content)
        with pytest.raises(
            ConfigError, match=r"^\S+/job\.json: made by another version .*remove the run's folder"
        ) as caught:
            load_job(tmp_path)
        assert "\n" not in str(caught.value)
    path.write_text(whole.replace('"num_train_rows": ', '"num_train_rows": 1'))
    with pytest.raises(ConfigError, match=r'job\.json is damaged: its content .* entry "checksum" if it was changed'):
        load_job(tmp_path)
    path.write_text(json.dumps({"run_id": 3}))
    with pytest.raises(ConfigError, match=r"job\.json\.run_id: expected a string, got 3"):
        load_job(tmp_path)
