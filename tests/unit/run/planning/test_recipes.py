"""Every recipe at real size can be planned from its config alone: no weights, no network, no GPU."""

import io
from pathlib import Path

import attrs
import pytest
from rich.console import Console

from cosmos_core.config.loading import load_recipe
from cosmos_core.config.mesh import world_size
from cosmos_core.errors import ConfigError
from cosmos_core.run import fork_server
from cosmos_core.run.command import run_recipe
from cosmos_core.run.planning.footprint import USABLE, memory_by_pool, verdicts
from cosmos_core.run.planning.memory import policy_memory
from cosmos_core.run.planning.plan import make_plan
from cosmos_core.run.planning.tables import print_plan
from tests import machines

RECIPES = Path(__file__).parents[4] / "recipes"
# Parameters of each model, as its authors publish them.
SIZES = {
    "llama-3-8b": 8_030_261_248,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-vl-7b": 8_292_166_656,
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "moonlight-16b-a3b": 15_960_108_544,
    "deepseek-v3": 671_026_404_352,
}


@pytest.fixture(autouse=True)
def _no_network(monkeypatch):
    def refuse(*_):
        raise AssertionError("planning asked the network")

    monkeypatch.setattr("socket.socket.connect", refuse)
    monkeypatch.setattr(fork_server, "place", lambda: None)  # a fork of this process is refused it, too
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def test_a_recipe_at_real_size_can_be_planned(tmp_path):
    """Of two models; the others are planned in `tests/nightly/run`."""
    check("grpo", "qwen2.5-vl-7b", tmp_path)
    check("sft", "qwen3-30b-a3b", tmp_path)


def check(kind, name, tmp_path):
    plan = planned(RECIPES / f"{kind}-{name}.toml", kind, name, tmp_path)
    if kind == "grpo":
        # The prompt asks for the form that the reward reads, so that a right answer gets more than a wrong one.
        (trial,) = plan.parts.first_row.trials
        assert {what: outcome.value for what, outcome in trial.outcomes.items()} == {"reference": 1, "wrong answer": 0}
        assert 'after "####"' in plan.parts.first_row.shown


def planned(path, kind, name, tmp_path):
    """Plan a recipe of a kind (`grpo` has rollouts) for a model by name, and check what planning says."""
    recipe = load_recipe(path)
    plan = make_plan(recipe, path, tmp_path)
    facts = plan.parts.facts
    assert facts.num_parameters == SIZES[name]
    assert plan.job.is_plain == ("chat = true" not in path.read_text() and recipe.dataset.plugin != "reason")
    assert sum(part.count * part.num_parameters for part in facts.parts) == facts.num_parameters
    assert plan.job.uses_rollouts == (kind == "grpo")
    assert plan.job.num_evaluation_prompts, "nothing is measured, so no checkpoint is the best"
    ranks = policy_memory(recipe, facts)
    processes = world_size(recipe.policy.mesh)
    assert sum(rank.count for rank in ranks) == processes

    # Every weight is on some process, and each process's memory is a GPU's.
    held = sum(rank.count * rank.device["parameters"] for rank in ranks)
    assert held == pytest.approx(4 * facts.num_parameters, rel=0.01)
    assert all(rank.is_whole and rank.device["activations"] for rank in ranks)
    told = verdicts(plan)
    if name == "deepseek-v3":
        assert "a GPU of 141 GB (H200) holds it" in told.pop("policy")
        assert all("no GPU of 80 GB (H100) or 141 GB (H200) holds it" in each for each in told.values())
        for rank in memory_by_pool(plan).get("rollout", ()):
            taken = sum(rank.device.values())
            assert 192e9 < taken / USABLE < 288e9, "the header tells GPUs that hold it, and that do not"
    else:
        assert all(machines.H100 in each for each in told.values()), told
    machines.check_header(path, plan)
    console = Console(file=io.StringIO(), width=160)
    print_plan(plan, console)
    text = console.file.getvalue()
    for part in ("parameters", "gradients", "optimizer", "activations", "GPUs"):
        assert part in text
    assert "config only: no weights here" in text
    assert "a run would be refused: model.path: " in text
    is_shown = plan.parts.measured.num_with_media > 0 and recipe.policy.parallel.recompute != "full"
    assert ("what towers keep of images" in text) == is_shown
    assert ("weight sync" in text) == ("published weights" in text) == (kind == "grpo")
    return plan


def test_a_run_without_weights_is_refused_before_it_starts(tmp_path):
    path = RECIPES / "sft-qwen3-8b.toml"
    recipe = load_recipe(path)
    run = attrs.evolve(recipe.run, output_dir=str(tmp_path))
    policy = attrs.evolve(recipe.policy, device="cpu")
    console = Console(file=io.StringIO(), width=160)
    with pytest.raises(ConfigError) as caught:
        run_recipe(attrs.evolve(recipe, run=run, policy=policy), path, console, overwrite=False)
    folder = RECIPES / "configs" / "Qwen3-8B"
    assert str(caught.value) == (
        f"model.path: {folder} holds a config but no weights (model.safetensors or model.safetensors.index.json); "
        "give a checkpoint (--set model.path=...)"
    )
    assert not list(tmp_path.iterdir())


def test_recipes_at_real_size_are_listed_and_without_weights():
    # Every recipe at real size is listed.
    there = {path.stem for path in RECIPES.glob("*.toml")} - {"arithmetic", "gsm8k"}
    assert {f"{kind}-{name}" for kind in ("grpo", "sft") for name in SIZES} <= there

    # The configs have no weights.
    assert {path.name for path in (RECIPES / "configs").rglob("*") if path.is_file()} <= {
        "config.json",
        "preprocessor_config.json",
    }
