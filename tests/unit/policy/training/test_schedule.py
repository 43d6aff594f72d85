import pytest

from cosmos_core.config.schema import OptimizerConfig
from cosmos_core.policy.training.gradients import learning_rate


def rates(steps, **config):
    return [learning_rate(OptimizerConfig(lr=1.0, **config), step=k, steps=steps) for k in range(1, steps + 1)]


def test_constant():
    assert rates(3) == [1.0, 1.0, 1.0]


def test_constant_with_warmup():
    assert rates(6, warmup_steps=4) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_linear_reaches_the_final_ratio_at_the_last_step():
    assert rates(5, schedule="linear", warmup_steps=1, final_lr_ratio=0.2) == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2])


def test_cosine():
    # Halfway between peak and end at half time: (1 + 0.1) / 2; at a quarter: 0.1 + 0.9 (1 + cos 45°) / 2.
    expected = [0.1 + 0.9 * 0.8535534, 0.55, 0.1 + 0.9 * 0.1464466, 0.1]
    assert rates(4, schedule="cosine") == pytest.approx(expected)


def test_the_warm_up_of_the_demo():
    config = OptimizerConfig(lr=5e-3, schedule="linear", warmup_steps=20)
    assert learning_rate(config, step=1, steps=900) == pytest.approx(2.5e-4)
    assert learning_rate(config, step=20, steps=900) == pytest.approx(5e-3)
    assert learning_rate(config, step=460, steps=900) == pytest.approx(5e-3 * 0.55)
    assert learning_rate(config, step=900, steps=900) == pytest.approx(5e-4)


def test_a_warmup_longer_than_the_stage():
    assert rates(2, schedule="linear", warmup_steps=4) == [0.25, 0.5]
    assert rates(4, schedule="linear", warmup_steps=4)[-1] == 1.0


def test_steps_beyond_the_stage_keep_the_last_rate():
    config = OptimizerConfig(lr=1.0, schedule="linear", final_lr_ratio=0.5)
    assert learning_rate(config, step=9, steps=4) == 0.5
