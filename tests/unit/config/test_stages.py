from cosmos_core.config.job import stages
from cosmos_core.config.loading import recipe_from

BASE = {
    "run": {"name": "a", "steps": 30},
    "model": {"path": "m"},
    "algorithm": {"plugin": "grpo", "options": {"x": 1}},
    "dataset": {"plugin": "arithmetic"},
    "policy": {"prompts_per_step": 4, "optimizer": {"lr": 3e-4}},
}


def test_one_stage_without_a_warmup():
    (main,) = stages(recipe_from(BASE))
    assert (main.index, main.key, main.plugin, main.options) == (0, "algorithm", "grpo", {"x": 1})
    assert (main.first_step, main.last_step, main.prompts_per_step, main.optimizer.lr) == (0, 30, 4, 3e-4)


def test_the_warmup_comes_first_with_its_own_numbers():
    warmup = {"plugin": "sft", "steps": 20, "prompts_per_step": 8, "optimizer": {"lr": 5e-3}}
    first, main = stages(recipe_from({**BASE, "warmup": warmup}))
    assert (first.index, first.key, first.plugin, first.first_step, first.last_step) == (0, "warmup", "sft", 0, 20)
    assert (first.prompts_per_step, first.optimizer.lr) == (8, 5e-3)
    assert (main.index, main.first_step, main.last_step, main.prompts_per_step) == (1, 20, 50, 4)
