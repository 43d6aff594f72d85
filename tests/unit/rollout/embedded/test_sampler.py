from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from cosmos_core.protocols import Sampling
from cosmos_core.rollout.embedded import sampler
from cosmos_core.rollout.embedded.sampler import RowSampling, SamplingFeatures, SlotNumbers, draw
from cosmos_core.rollout.serving.randomness import sample_key


def row_sampling(rows: int, **kinds) -> RowSampling:
    keys = torch.tensor([sample_key(1, index) for index in range(rows)])
    return RowSampling(keys_R=keys, units_R=torch.zeros(rows, dtype=torch.int64), **kinds)


def test_frequencies_follow_the_distribution():
    for vocabulary in [5, 1024, 1025, 5000]:
        torch.manual_seed(0)
        logits = torch.full((vocabulary,), -8.0)
        favourites = torch.randperm(vocabulary)[:5]
        logits[favourites] = torch.tensor([0.0, 1.0, 2.0, 1.5, 0.5])
        rows = 5000
        tokens, logprobs = draw(logits.expand(rows, -1), row_sampling(rows))
        expected = torch.softmax(logits, -1)
        found = torch.bincount(tokens, minlength=vocabulary) / rows
        deviation = (expected * (1 - expected) / rows).sqrt()
        assert ((found - expected).abs() < 5 * deviation + 2 / rows).all()
        torch.testing.assert_close(logprobs, expected.log()[tokens], atol=1e-5, rtol=0)


def test_two_levels_draw_the_same_as_one(monkeypatch):
    torch.manual_seed(0)
    logits = torch.randn(500, 1000) * 2
    one, _ = draw(logits, row_sampling(500))
    monkeypatch.setattr(sampler, "_BLOCK", 64)
    two, _ = draw(logits, row_sampling(500))
    assert (one == two).all()


def test_temperature_divides_the_logits():
    logits = torch.randn(6, 50)
    temperature = torch.tensor([0.5, 1.0, 2.0, 0.1, 3.0, 1.0])
    tokens, logprobs = draw(logits, row_sampling(6, temperature_R=temperature))
    expected = torch.log_softmax(logits / temperature[:, None], -1).gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(logprobs, expected, atol=1e-6, rtol=1e-6)


def restricted(logits, top_k, top_p, rows=3000):
    tokens, logprobs = draw(
        logits.expand(rows, -1),
        row_sampling(rows, top_k_R=torch.full((rows,), top_k), top_p_R=torch.full((rows,), top_p)),
    )
    return set(tokens.tolist()), dict(zip(tokens.tolist(), logprobs.tolist(), strict=True))


def test_top_k_renormalises_over_the_k_likeliest():
    logits = torch.tensor([0.1, 3.0, 0.2, 2.5, 1.0, -1.0])
    drawn, logprobs = restricted(logits, 2, 1.0)
    assert drawn == {1, 3}
    expected = torch.log_softmax(logits[[1, 3]], -1)
    assert logprobs[1] == pytest.approx(expected[0].item(), abs=1e-6)
    assert logprobs[3] == pytest.approx(expected[1].item(), abs=1e-6)


def test_top_p_keeps_the_smallest_set_that_holds_the_mass():
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    assert restricted(logits, 4, 0.69)[0] == {0, 1}
    assert restricted(logits, 4, 0.75)[0] == {0, 1, 2}
    assert restricted(logits, 4, 0.01)[0] == {0}
    assert restricted(logits, 4, 1.0)[0] == {0, 1, 2, 3}


def test_top_p_counts_the_mass_that_top_k_left():
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    # Of the two kept the first has 4/7 = 0.571.
    assert restricted(logits, 2, 0.57)[0] == {0}
    assert restricted(logits, 2, 0.58)[0] == {0, 1}


def test_greedy_rows_take_the_likeliest_and_tell_the_models_own_logprob():
    logits = torch.randn(4, 30)
    greedy = torch.tensor([True, False, True, False])
    tokens, logprobs = draw(logits, row_sampling(4, greedy_R=greedy))
    plain, _ = draw(logits, row_sampling(4))
    best = logits.argmax(-1)
    assert tokens.tolist() == [best[0], plain[1], best[2], plain[3]]
    torch.testing.assert_close(logprobs, torch.log_softmax(logits, -1).gather(1, tokens[:, None])[:, 0])


def test_impossible_tokens_are_never_drawn():
    logits = torch.full((20_000, 3), -torch.inf)
    logits[:, 1] = 0.0
    assert draw(logits, row_sampling(20_000))[0].unique().tolist() == [1]


def test_a_distribution_that_is_not_finite_shows_in_the_logprob():
    logits = torch.tensor([[0.0, float("nan"), 1.0], [0.0, 1.0, 2.0]])
    _, logprobs = draw(logits, row_sampling(2))
    assert torch.isfinite(logprobs).tolist() == [False, True]


def test_a_sequence_that_moves_takes_along_how_it_is_drawn():
    samplings = [
        Sampling(max_units=9),
        Sampling(max_units=9, temperature=0.0),
        Sampling(max_units=9, temperature=0.5, top_k=3, top_p=0.75),
    ]
    sequences = [
        SimpleNamespace(
            parent=SimpleNamespace(request=SimpleNamespace(sampling=sampling), offset=100),
            tokens=[7] * (index + 2),
            num_generated=index,
            key=40 + index,
        )
        for index, sampling in enumerate(samplings)
    ]
    every = SamplingFeatures.GREEDY | SamplingFeatures.SCALED | SamplingFeatures.RESTRICTED

    def held(numbers, num):
        how = numbers.row_sampling(num, every)
        columns = (how.keys_R, how.units_R, how.temperature_R, how.greedy_R, how.top_k_R, how.top_p_R)
        return list(zip(*(column.tolist() for column in (*numbers.feed(num), *columns)), strict=True))

    numbers = SlotNumbers(4, 50, torch.device("cpu"))
    numbers.place(0, sequences)
    first, second, third = held(numbers, 3)
    assert [first, second, third] == [
        (7, 1, 101, 40, 0, 1.0, False, 50, 1.0),
        (7, 2, 102, 41, 1, 1.0, True, 50, 1.0),
        (7, 3, 103, 42, 2, 0.5, False, 3, 0.75),
    ]
    numbers.move([2, 1], [0, 3])
    assert held(numbers, 4) == [third, second, third, second]
    numbers.advance(torch.tensor([8]))
    assert held(numbers, 2) == [(8, 4, 104, 42, 3, 0.5, False, 3, 0.75), second]
