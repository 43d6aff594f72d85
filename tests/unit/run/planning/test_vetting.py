"""Planning shows the dataset's first rows to the rewards, before a run finds out hours later."""

import json
from pathlib import Path

import pytest

from cosmos_core.config.loading import load_recipe
from cosmos_core.errors import ConfigError
from cosmos_core.run.planning.plan import make_plan

RECIPE = Path(__file__).parents[4] / "recipes" / "arithmetic.toml"
BY_FIELD = "reward=[{plugin='math'}, {plugin='length', name='brief', options={target_field='words'}}]"


def plan(tmp_path, *overrides):
    return make_plan(load_recipe(RECIPE, overrides=overrides), RECIPE, tmp_path)


def test_rows_that_no_completion_could_be_scored_of_are_refused(tmp_path):
    with pytest.raises(ConfigError) as refused:
        plan(tmp_path, BY_FIELD)
    message = str(refused.value)
    assert "none of the 200 train rows of 'arithmetic' that were looked at can be used" in message
    assert "reward brief: the metadata field 'words' is to be a whole number from 1 on, and is not among" in message


def test_some_of_them_are_counted(tmp_path):
    rows = [{"question": "1+1=", "answer": answer} for answer in ("2", True, "2", "2")]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    fields = "prompt='{question}', demonstration='{question}', reference='answer'"
    dataset = f"dataset={{plugin='jsonl', options={{train='{path}', heldout='{path}', {fields}}}}}"
    made = plan(tmp_path / "staging", dataset, "reward=[{plugin='exact'}]")
    assert (made.parts.measured.num_unusable, made.parts.measured.num_rows) == (1, 4)
    assert "reward exact: the reference True" in made.parts.measured.fault


def test_rewards_are_planned_without_what_they_load(tmp_path, monkeypatch):
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    judge = "{plugin='judge', options={url='https://j.example', model='m', key_variable='NO_SUCH_KEY'}}"
    model = "{plugin='reward-model', options={path='no-such-folder'}}"
    made = plan(tmp_path, f"reward=[{judge}, {model}]")
    assert made.job.recipe.reward_names == ("judge", "reward-model")
