"""New weights under 64 sequences, against transformers' own forwards with its own cache."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import DynamicCache

NEVER = frozenset()
NUM_UNITS = 40


@pytest.fixture
def updated(kit, make, monkeypatch):
    """Completions of 64 requests, a third of them made when version 7 came; the old weights and the new ones."""

    def run(cache):
        paused = kit.pause_when(monkeypatch, lambda engine: engine.stats().generated_units >= 64 * NUM_UNITS // 3)
        engine = make(kit.FakeModel(stop_ids=NEVER), max_in_flight=64)
        prompts = kit.ragged(64)
        handles = engine.submit(
            [kit.request(index, prompt, seed=index, max_units=NUM_UNITS) for index, prompt in enumerate(prompts)]
        )
        assert paused.wait(30)
        before, changed = engine.stats(), kit.reference(seed=2)
        assert (before.num_running, before.num_waiting) == (64, 0)
        kit.load(engine, changed, version=7, cache=cache)
        engine.resume()
        results = [handle.result(60)[0] for handle in handles]
        assert engine.stats().generated_units == 64 * NUM_UNITS
        made = np.stack([kit.versions(each) for each in results])
        assert made.shape == (64, NUM_UNITS)
        assert (made == 0).sum() == before.generated_units
        assert ((made == 0) | (made == 7)).all()
        assert (np.diff(made, axis=1) >= 0).all()
        assert 0 < (made == 7).sum() < 64 * NUM_UNITS
        return prompts, results, made, kit.reference(seed=1), changed

    return run


def test_with_the_cache_recomputed_later_log_probs_are_those_of_the_new_weights(kit, updated):
    for prompt, generated, made, old, new in zip_with(updated("recompute")):
        answer = kit.completion(generated)
        for weights, version in ((old, 0), (new, 7)):
            expected = kit.plain_logprobs(weights, prompt, answer)
            there = made == version
            np.testing.assert_allclose(kit.logprobs(generated)[there], expected[there], atol=5e-5, rtol=0)


def test_with_the_cache_kept_later_log_probs_are_those_of_the_new_weights_over_old_keys_and_values(kit, updated):
    apart = []
    for prompt, generated, made, old, new in zip_with(updated("keep")):
        answer, found = kit.completion(generated), kit.logprobs(generated)
        num_old = int((made == 0).sum())
        np.testing.assert_allclose(found, over_old_cache(old, new, prompt, answer, num_old), atol=5e-5, rtol=0)
        apart.append(np.abs(found - kit.plain_logprobs(new, prompt, answer))[num_old:])
    # So no trainer finds them: the recorded ones are all there is.
    assert np.concatenate(apart).mean() > 0.1


def zip_with(run):
    prompts, results, made, old, new = run
    for prompt, generated, versions in zip(prompts, results, made, strict=True):
        yield prompt, generated, versions, old, new


@torch.no_grad()
def over_old_cache(old, new, prompt, answer, num_old):
    """Log-probs of an answer whose first units the old weights computed, into a cache that the new ones go on with."""
    cache = DynamicCache()
    tokens = prompt + answer
    # The last unit that the old weights drew is the first one that the new ones are fed.
    fed = len(prompt) + num_old - 1
    before = old(input_ids=torch.tensor([tokens[:fed]]), past_key_values=cache, use_cache=True).logits[0]
    after = new(input_ids=torch.tensor([tokens[fed:]]), past_key_values=cache, use_cache=True).logits[0]
    logits = torch.cat([before, after])[len(prompt) - 1 : -1]
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(answer)[:, None])[:, 0].numpy()
