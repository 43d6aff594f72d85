"""Planning shows the dataset's first rows to the rewards, before a run finds out hours later."""

import json
import socket
from pathlib import Path

import pytest

from cosmos_core.config.loading import load_recipe
from cosmos_core.errors import ConfigError, DataError
from cosmos_core.models.diffusion.model import DiffusionModel
from cosmos_core.run.planning import tables
from cosmos_core.run.planning.footprint import NO_GPU
from cosmos_core.run.planning.parts import look_at_rows
from cosmos_core.run.planning.plan import check_present, make_plan
from cosmos_core.run.planning.tables import _pace, _rows, _smaller
from cosmos_core.types import Message, Payload, Prompt

RECIPE = Path(__file__).parents[4] / "recipes" / "arithmetic.toml"
BY_FIELD = "reward=[{plugin='math'}, {plugin='length', name='brief', options={target_field='words'}}]"


def plan(tmp_path, *overrides):
    return make_plan(load_recipe(RECIPE, overrides=overrides), RECIPE, tmp_path)


def test_rows_that_no_completion_could_be_scored_of_are_refused(tmp_path):
    with pytest.raises(ConfigError) as refused:
        plan(tmp_path, BY_FIELD)
    message = str(refused.value)
    assert "none of the 200 train rows of 'arithmetic' that were looked at can be used" in message
    told = "reward brief: the metadata field 'words' is to be a whole number from 1 on, but the row has no metadata"
    assert told in message

    # Some of them are counted.
    rows = [{"question": "1+1=", "answer": answer} for answer in ("2", True, "2", "2")]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    fields = "prompt='{question}', demonstration='{question}', reference='answer'"
    dataset = f"dataset={{plugin='jsonl', options={{train='{path}', heldout='{path}', {fields}}}}}"
    made = plan(tmp_path / "staging", dataset, "reward=[{plugin='exact'}]")
    assert (made.parts.measured.num_unusable, made.parts.measured.num_rows) == (1, 4)
    assert "reward exact: the reference True" in made.parts.measured.fault

    # Where a stage imitates, rows without a demonstration are told.
    said = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    rows = [{"chat": said, "answer": "2"}] * 2 + [{"chat": said[:1], "answer": "2"}, {"chat": said, "answer": "2"}]
    path.write_text("\n".join(map(json.dumps, rows)))
    dataset = f"dataset={{plugin='jsonl', options={{train='{path}', messages='chat', reference='answer'}}}}"
    made = plan(tmp_path / "bare", dataset, "reward=[{plugin='exact'}]", "evaluation.prompts=0")
    assert "1 of 4 looked at have no demonstration, the first of them row 2 (from 0)" in _rows(
        made.job.recipe, made.parts
    )


def test_rewards_are_planned_without_what_they_load(tmp_path, monkeypatch):
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    judge = "{plugin='judge', options={url='https://j.example', model='m', key_variable='NO_SUCH_KEY'}}"
    model = "{plugin='reward-model', options={path='no-such-folder'}}"
    made = plan(tmp_path, f"reward=[{judge}, {model}]")
    assert made.job.recipe.reward_names == ("judge", "reward-model")
    told = "reward.0.options.key_variable: NO_SUCH_KEY is not set in this environment; set it to the key"
    assert made.parts.absent == (told,)
    assert ("missing here", f"a run on this machine would be refused: {told}") in list(_pace(made))
    # What no GPU holds is told with what takes less.
    with monkeypatch.context() as patched:
        patched.setattr(tables, "verdicts", lambda plan: {"policy": f"144.5 GiB: {NO_GPU}", "rollout": "1 GiB: fits"})
        told = dict(_pace(made))
    larger = "it takes less with a larger policy.mesh.dp_shard"
    lora, recompute, end = ", or policy.lora", ", or policy.parallel.recompute", " (docs/layouts.md)"
    assert told["policy memory"].endswith(f"{NO_GPU}; {larger}{lora}{recompute}{end}")
    assert told["rollout memory"] == "1 GiB: fits"
    for overrides, said in [
        (["policy.lora={}"], f"{larger}{recompute}{end}"),
        (["policy.parallel.recompute=full"], f"{larger}{lora}{end}"),
        (["policy.lora={}", "policy.parallel.recompute=selective"], f"{larger}{recompute} = 'full'{end}"),
    ]:
        assert _smaller("policy", load_recipe(RECIPE, overrides=overrides)) == said
    for form, said in [("none", ", or rollout.quantization,"), ("fp8", ",")]:
        recipe = load_recipe(RECIPE, overrides=[f"rollout.quantization={form}"])
        assert f"with a larger rollout.mesh.tp{said} if the engine has it" in _smaller("rollout", recipe)
    with pytest.raises(ConfigError, match=r"^reward\.0\.options\.key_variable: NO_SUCH_KEY"):
        check_present(made.parts)
    monkeypatch.setenv("NO_SUCH_KEY", "k")
    with socket.create_server(("127.0.0.1", 0)) as server:
        there = judge.replace("https://j.example", f"http://127.0.0.1:{server.getsockname()[1]}")
        check_present(plan(tmp_path / "again", f"reward=[{there}]").parts)
    with pytest.raises(ConfigError, match=r"^reward\.0\.options\.url: .* no connection \(.*; start the service, or"):
        check_present(plan(tmp_path / "away", f"reward=[{there}]").parts)


WORLD = RECIPE.parent / "wfm" / "wan-tiny-sft.toml"


def world_plan(tmp_path, *overrides):
    return make_plan(load_recipe(WORLD, overrides=overrides), WORLD, tmp_path)


def test_videos_that_are_too_short_for_the_model_are_told(tmp_path, monkeypatch):
    measured = world_plan(tmp_path, "model.options.num_frames=8").parts.measured
    assert measured.num_unusable == min(4, measured.num_rows)
    assert "4 frames at 8 a second are fewer than the 8 that are needed: too short; lower num_frames" in measured.fault

    # Some videos are read.
    read, own = [], DiffusionModel.vet

    def vet(self, prompt):
        read.append(prompt)
        if len(read) == 1:
            raise DataError("the first is too short")
        own(self, prompt)

    monkeypatch.setattr(DiffusionModel, "vet", vet)
    measured = world_plan(tmp_path).parts.measured
    assert (measured.num_unusable, measured.fault) == (1, "the first is too short")
    assert len(read) == 4
    assert measured.num_vetted == 3

    # Only what is learned is vetted by the model.
    for imitates, unusable in [(True, 3), (False, 0)]:
        recipe = load_recipe(RECIPE)
        sizes = {"train": 3, "heldout": 0}
        measured = look_at_rows(Short(), Rows(), [], sizes, recipe, imitates=imitates, longest=1)
        assert measured.num_unusable == unusable
    # Whether the row shows an image, or a turn of it.
    assert measured.num_with_media == 2


class Short:
    """A model that finds every demonstration too short."""

    def encode(self, prompt):
        return Payload(kind="latents", arrays={})

    def vet(self, prompt):
        raise DataError("too short")


class Rows:
    def row(self, split, index):
        shown = ("a.png",)
        text = (Message(role="user", content="red", media=shown),) if index == 1 else "red"
        return Prompt(text=text, demonstration="film.mp4", media=shown if index == 2 else ())
