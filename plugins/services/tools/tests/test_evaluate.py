"""The score of `cosmos eval` is that of a run's own evaluations."""

from types import SimpleNamespace

import attrs
import numpy as np
import pytest

from cosmos_core.config.order import evaluation_seed
from cosmos_core.config.schema import EvaluationConfig, RolloutConfig, RunConfig
from cosmos_core.errors import ConfigError
from cosmos_core.protocols import FinishReason, Generated
from cosmos_core.types import Array, Payload, Prompt, Sample, SampleStatus
from cosmos_service_tools import evaluation
from cosmos_service_tools.evaluation import _check_key, _complete, _result, evaluate_model
from cosmos_service_tools.served import Served


def sample(first, second):
    """A sample with two rewards, the second of half the weight; without any if `first` is None."""
    is_scored = first is not None
    return Sample(
        index=0,
        status=SampleStatus.OK if is_scored else SampleStatus.REWARD_FAILED,
        reward=first + second / 2 if is_scored else None,
        rewards={"right": first, "short": second} if is_scored else {},
        oldest_version=0,
        newest_version=0,
        num_units=3,
        num_prompt_units=2,
    )


SAMPLES = [sample(1.0, -4.0), sample(0.0, -2.0), sample(None, None)]


def test_the_score_is_that_of_a_run():
    # An accuracy is of the first reward, and unscored prompts count.
    found = _result(SAMPLES, "accuracy", num_prompts=4)
    assert (found.score, found.num_unscored, found.name) == (0.25, 2, "accuracy")

    # A reward is the mean of those that have one.
    found = _result(SAMPLES, "reward", num_prompts=4)
    assert (found.score, found.num_unscored, found.name) == (-1.0, 2, "reward")
    assert found.rewards == {"right": 0.5, "short": -3.0}

    # Where nothing was scored there is none.
    for name in ["accuracy", "reward"]:
        assert _result(SAMPLES[2:], name, num_prompts=1).score is None

    # The mean is of what was counted.
    unweighed = attrs.evolve(SAMPLES[0], reward=None)
    assert _result([unweighed, SAMPLES[1]], "reward", num_prompts=2).score == -1.0


def test_each_row_has_the_noise_of_the_runs_own_evaluations():
    class Engine:
        def submit(self, requests):
            self.seeds = [request.seed for request in requests]
            done = Generated(payload=prompt, reason=FinishReason.STOP, oldest_version=0, newest_version=0, num_units=1)
            return [SimpleNamespace(result=lambda: [done]) for _ in requests]

    prompt = Payload(
        kind="latents", arrays={"prompt": Array(dtype="float32", shape=(1,), data=np.float32([0]).tobytes())}
    )
    served = Served(model=SimpleNamespace(encode=lambda _: prompt), engine=Engine(), context_length=8)
    recipe = SimpleNamespace(
        environment=None,
        run=RunConfig(name="r", steps=1, seed=11),
        evaluation=EvaluationConfig(),
        rollout=RolloutConfig(),
    )
    rows = [(5, Prompt(text="red")), (2, Prompt(text="blue"))]
    _complete(served, rows, SimpleNamespace(recipe=recipe))
    assert served.engine.seeds == [evaluation_seed(11, 5), evaluation_seed(11, 2)]


def test_what_cannot_be_evaluated_is_told_before_anything_is_generated(tmp_path, monkeypatch):
    # A folder that is not there is told first.
    with pytest.raises(ConfigError, match="nope: there is no such folder; give a run's, or an exported model's"):
        evaluate_model(tmp_path / "nope", recipe_path=None, num_prompts=1, step="latest")

    # A key that no row has is refused with those that they have.
    rows = [
        Prompt(text="a", metadata={"level": 1}),
        Prompt(text="b", metadata={"level": 2, "part": "x"}),
        Prompt(text="c"),
    ]
    _check_key("part", rows)
    with pytest.raises(ConfigError, match=r"--by: no row's metadata has 'parts'; they have 'level', 'part'$"):
        _check_key("parts", rows)
    with pytest.raises(ConfigError, match=r"has 'part'; they have none$"):
        _check_key("part", rows[2:])

    # What rewards lack is told before anything is generated.
    class Keyed:
        def absent(self):
            return "KEY: not set"

    def generate(*_):
        raise AssertionError("it was generated")

    (tmp_path / "recipe.toml").write_text(
        'run = {name = "r", steps = 1}\nmodel = {plugin = "hf", config = {model_type = "qwen3"}}\n'
        'algorithm = {plugin = "grpo"}\ndataset = {plugin = "numbers"}\npolicy = {optimizer = {lr = 1e-6}}\n'
        'reward = [{plugin = "keyed", name = "judged"}]\n'
    )
    monkeypatch.setattr(evaluation, "_evaluate", generate)
    monkeypatch.setattr(evaluation, "load_rewards", lambda *_: (Keyed(),))
    monkeypatch.setattr(evaluation.PluginSet, "load", lambda _: None)
    monkeypatch.setattr(evaluation, "is_of_tokens", lambda *_: True)
    with pytest.raises(ConfigError, match=r"^reward judged: KEY: not set$"):
        evaluate_model(tmp_path, recipe_path=tmp_path / "recipe.toml", num_prompts=1, step="latest")
