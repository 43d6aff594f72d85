from __future__ import annotations

import torch

from cosmos_core.rollout.serving.randomness import sample_key, uniforms

MASK = (1 << 64) - 1


def splitmix64(state: int) -> int:
    """The published generator, in Python's own integers."""
    state &= MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK
    return state ^ (state >> 31)


def test_matches_the_published_generator():
    keys = [sample_key(seed, index) for seed in (0, 1, 2**63 - 1) for index in range(5)]
    units = list(range(len(keys)))
    expected = [
        (splitmix64(key + (unit + 1) * 0x9E3779B97F4A7C15) >> 11) / 2**53 for key, unit in zip(keys, units, strict=True)
    ]
    assert uniforms(torch.tensor(keys), torch.tensor(units)).tolist() == expected


def test_known_first_outputs_of_seed_zero():
    first = uniforms(torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)).item()
    assert first == (0xE220A8397B1DCDAF >> 11) / 2**53


def test_draws_are_uniform_and_uncorrelated_between_samples():
    keys = torch.tensor([sample_key(7, index) for index in range(64)])
    draws = torch.stack([uniforms(keys, torch.full((64,), unit)) for unit in range(256)])
    assert draws.min() >= 0
    assert draws.max() < 1
    assert abs(draws.mean() - 0.5) < 0.01
    assert abs(draws.var() - 1 / 12) < 0.002
    correlations = torch.corrcoef(draws.T) - torch.eye(64)
    assert correlations.abs().max() < 0.3


def test_keys_differ_by_seed_and_by_index():
    keys = {sample_key(seed, index) for seed in range(50) for index in range(50)}
    assert len(keys) == 2500
