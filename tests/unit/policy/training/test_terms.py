from types import SimpleNamespace

import pytest

from cosmos_core.config.job import Job, StageFacts
from cosmos_core.config.loading import recipe_from
from cosmos_core.config.schema import OptimizerConfig
from cosmos_core.errors import CheckpointError, ConfigError
from cosmos_core.plugins.selection import PluginSet
from cosmos_core.policy.training.setup import StageSettings

DATA = {
    "run": {"name": "r", "steps": 3},
    "model": {"path": "somewhere"},
    "algorithm": {"plugin": "grpo"},
    "policy": {"optimizer": {"lr": 1e-6}},
    "dataset": {"plugin": "jsonl"},
    "reward": [{"plugin": "math"}],
    "rollout": {"sampling": {"temperature": 0.8}},
    "warmup": {"optimizer": {"lr": 1e-6}, "plugin": "sft", "steps": 2},
}
LR, CLIP, TEMPERATURE = "policy.optimizer.lr", "algorithm.options.clip_high", "rollout.sampling.temperature"


class Trainer:
    """Notes what it is told to go by."""

    def __init__(self):
        self.step, self.begun, self.changed = 0, [], []

    def begin_stage(self, stage, algorithm, temperature):
        self.stage = stage
        self.begun.append((stage, algorithm, temperature))

    def change(self, stage, algorithm):
        self.stage = stage
        self.changed.append((stage, algorithm))


@pytest.fixture
def data():
    return DATA


@pytest.fixture
def terms(tmp_path, data):
    recipe = recipe_from(data)
    job = Job(
        run_id="r",
        directory=tmp_path,
        recipe_directory=tmp_path,
        recipe=recipe,
        num_train_rows=1,
        num_heldout_rows=0,
        num_evaluation_prompts=0,
        uses_rollouts=True,
        stages=(StageFacts(source="demonstrations"), StageFacts(source="rollouts")),
    )
    trainer = Trainer()
    plugins = PluginSet.load([("algorithm", data["algorithm"]["plugin"]), ("algorithm", "sft")])
    return SimpleNamespace(terms=StageSettings(job, plugins, trainer), trainer=trainer)


def test_values_are_adopted_once_and_the_algorithm_is_made_anew(terms):
    terms.terms.begin_stage(1)
    before = terms.trainer.begun[0][1]
    terms.terms.adopt({})
    assert terms.trainer.changed == []
    terms.terms.adopt({LR: 0.5, CLIP: 0.4})
    terms.terms.adopt({CLIP: 0.4, LR: 0.5})
    ((stage, algorithm),) = terms.trainer.changed
    assert stage.optimizer == OptimizerConfig(lr=0.5)
    assert (before._surrogate.high, algorithm._surrogate.high) == (0.2, 0.4)
    terms.terms.adopt({})
    assert terms.trainer.stage.optimizer == OptimizerConfig()


def test_a_stage_begins_with_the_values_that_hold(terms):
    terms.terms.begin_stage(0)
    terms.terms.adopt({LR: 0.5, TEMPERATURE: 0.3})
    assert terms.trainer.stage.key == "warmup"
    terms.terms.begin_stage(1)
    stage, _, temperature = terms.trainer.begun[-1]
    assert stage.optimizer.lr == 0.5
    # Who was drawn at another temperature than the recipe's says so itself.
    assert temperature == 0.8
    terms.terms.adopt({LR: 0.5, TEMPERATURE: 0.3})
    assert len(terms.trainer.changed) == 1


@pytest.mark.parametrize("data", [{**DATA, "algorithm": {"plugin": "ppo"}, "critic": {}}])
def test_a_stage_does_not_begin_with_values_that_need_a_model_the_recipe_lacks(terms):
    """Adopted in the stage before, they come into force with their own."""
    terms.terms.begin_stage(0)
    terms.terms.adopt({"algorithm.options.kl_weight": 0.1})
    with pytest.raises(ConfigError, match=r"reference: 'ppo' with these algorithm\.options consults a reference"):
        terms.terms.begin_stage(1)
    assert len(terms.trainer.begun) == 1


def test_a_stage_that_the_recipe_lacks(terms):
    with pytest.raises(CheckpointError, match="stage 2"):
        terms.terms.begin_stage(2)
