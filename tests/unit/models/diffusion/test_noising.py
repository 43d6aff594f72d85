"""Times and noise of regressions: the laws that they are drawn by, and the numbers that alone decide them."""

import math

import pytest
import torch

from cosmos_core.models.diffusion.noising import LEAST, draw_times, generator_of, noise_of
from cosmos_core.models.diffusion.options import DiffusionOptions


def drawn(law, *, mean=0.0, std=1.0, shift=1.0, number=20_000):
    options = DiffusionOptions(times=law, times_mean=mean, times_std=std, times_shift=shift)
    return draw_times(options, number, generator_of(3, 0)).double()


def test_logit_normal_times_have_normal_logits():
    logits = torch.logit(drawn("logit-normal", mean=0.5, std=0.8))
    assert float(logits.mean()) == pytest.approx(0.5, abs=0.02)
    assert float(logits.std()) == pytest.approx(0.8, abs=0.02)


def test_edm_times_are_those_of_log_normal_noise_levels():
    times = drawn("edm", mean=-1.2, std=1.2)
    levels = (times / (1 - times)).log()
    assert float(levels.mean()) == pytest.approx(-1.2, abs=0.03)
    assert float(levels.std()) == pytest.approx(1.2, abs=0.03)


def test_uniform_times_are_shifted_towards_noise():
    times = drawn("uniform", shift=3.0)
    # t' > 3/4 where t > 1/2.
    assert float((times > 0.75).double().mean()) == pytest.approx(0.5, abs=0.02)
    assert float(drawn("uniform").mean()) == pytest.approx(0.5, abs=0.01)


def test_times_keep_away_from_the_ends():
    times = drawn("logit-normal", std=40.0)
    assert float(times.min()) == pytest.approx(LEAST)
    assert float(times.max()) == pytest.approx(1 - LEAST)


def test_noise_is_drawn_of_two_numbers_alone():
    torch.manual_seed(1)
    first = noise_of(7, 2, (3, 50))
    torch.manual_seed(2)
    assert torch.equal(first, noise_of(7, 2, (3, 50)))
    for other in (noise_of(7, 3, (3, 50)), noise_of(8, 2, (3, 50)), noise_of(2, 7, (3, 50))):
        correlation = float((first * other).mean())
        assert abs(correlation) < 4 / math.sqrt(150)
