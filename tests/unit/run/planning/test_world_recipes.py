"""Recipes of world models can be planned: tiny ones as they are, those at real size from configs alone.

All of them are planned in `tests/nightly/run`.
"""

import io
import math
from pathlib import Path

import attrs
import pytest
from rich.console import Console

from cosmos_core.config.loading import load_recipe
from cosmos_core.config.mesh import world_size
from cosmos_core.run.planning.footprint import GPU_MEMORY, OUTSIDE, USABLE, latent_bytes, memory_by_pool
from cosmos_core.run.planning.memory import LATENT_COPIES
from cosmos_core.run.planning.plan import make_plan
from cosmos_core.run.planning.tables import print_plan
from tests import machines

FOLDER = Path(__file__).parents[4] / "recipes" / "wfm"
RECIPES = sorted(path.stem for path in FOLDER.glob("*.toml") if path.stem != "rewards")
TINY = [name for name in RECIPES if "-tiny-" in name]
REAL = [name for name in RECIPES if "-tiny-" not in name]
# Parameters of each transformer: of Wan as its authors publish them, of Cosmos as diffusers' class makes them.
SIZES = {
    "wan2.1-1.3b": 1_418_996_800,
    "wan2.1-14b": 14_288_491_584,
    "cosmos-predict2.5-2b": 2_059_174_912,
    "cosmos-predict2.5-14b": 14_368_047_104,
}


@pytest.fixture(autouse=True)
def _no_network(monkeypatch):
    def refuse(*_):
        raise AssertionError("planning asked the network")

    monkeypatch.setattr("socket.socket.connect", refuse)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def planned(name, folder):
    path = FOLDER / f"{name}.toml"
    recipe = load_recipe(path)
    assert recipe.run.name == name
    return recipe, make_plan(recipe, path, folder)


def check(name, tmp_path):
    recipe, plan = planned(name, tmp_path)
    facts = plan.parts.facts
    (size,) = (size for model, size in SIZES.items() if name.startswith(model))
    assert facts.num_parameters == size
    assert plan.job.uses_rollouts == bool(recipe.reward)
    ranks = memory_by_pool(plan)["policy"]
    assert sum(rank.count for rank in ranks) == world_size(recipe.policy.mesh)
    limit = USABLE * next(iter(GPU_MEMORY.values()))
    assert all(sum(rank.device.values()) < limit for ranks in memory_by_pool(plan).values() for rank in ranks)
    machines.check_header(FOLDER / f"{name}.toml", plan)
    console = Console(file=io.StringIO(), width=160)
    print_plan(plan, console)
    text = console.file.getvalue()
    assert "config only: no weights here" in text
    assert "a run would be refused: model.path: " in text
    return recipe, plan


# Of one process: its sequences, the decisions of each, how often these are packed, and latents of one decision.
KEPT = {
    "cosmos-predict2.5-2b-nft": (16 * 24 // 2, 4, 1, (16, 24, 88, 160)),
    "wan2.1-14b-grpo": (16 * 24 // 4, 2, 2, (16, 9, 60, 104)),
}


def test_latents_of_a_step_and_references_of_them_are_counted(tmp_path):
    for name, (sequences, decisions, packings, shape) in KEPT.items():
        recipe, plan = check(name, tmp_path)
        each, number = 4 * math.prod(shape), sequences * decisions
        # What a sample came with: itself, and of transitions the states that they lead to.
        held = sequences if plan.parts.preflight.decisions == "regressions" else sequences + number
        (rank,) = memory_by_pool(plan)["policy"]
        assert rank.host["reference predictions"] == number * each
        assert rank.host["latents of a step"] == (held + 2 * packings * number) * each
        assert rank.device["latents"] == LATENT_COPIES * recipe.policy.micro_batch_units * each
        assert "reference predictions" not in rank.device
        (rollout,) = memory_by_pool(plan)["rollout"]
        assert {*rollout.device} == {"parameters", "latents in flight", OUTSIDE}
        unasked = attrs.evolve(plan.parts, consults={})
        assert "reference predictions" not in latent_bytes(recipe, unasked)


def test_demonstrations_are_counted_alone_and_beside_rollouts(tmp_path):
    recipe, plan = planned("wan-tiny-ddrl", tmp_path)
    each, drawn = 4 * 3 * 4 * 8 * 8, 2
    warmup = attrs.evolve(plan.parts, stages=plan.parts.stages[:1])
    shown = recipe.warmup.prompts_per_step
    assert latent_bytes(recipe, warmup) == {"latents of a step": shown * (1 + 2 * drawn) * each}
    alone = attrs.evolve(plan.parts, imitates={})
    beside = recipe.policy.prompts_per_step * plan.parts.imitates[1] * (1 + 2 * drawn) * each
    both, without = latent_bytes(recipe, plan.parts), latent_bytes(recipe, alone)
    assert both["latents of a step"] == without["latents of a step"] + beside


def test_frames_that_rows_give_are_known_to_the_run(tmp_path):
    path = FOLDER / "cosmos-tiny-grpo-fast.toml"
    for number in (0, 2):
        recipe = load_recipe(path, overrides=[f"dataset.options.given_frames={number}"])
        assert make_plan(recipe, path, tmp_path / str(number)).job.given_frames == number


def test_there_is_one_of_each_algorithm_for_each_purpose():
    def algorithms(names):
        return {load_recipe(FOLDER / f"{name}.toml").algorithm.plugin for name in names}

    every = {"sft", "flow-grpo", "ddrl", "diffusion-nft"}
    assert algorithms(TINY) == algorithms(REAL) == every
    assert {model for model in SIZES if any(name.startswith(model) for name in REAL)} == set(SIZES)
