from __future__ import annotations

import time

import attrs
import numpy as np
import pytest
import torch

from cosmos_core.errors import EngineError, EngineLostError
from cosmos_core.types import Array

NEVER = frozenset()


def check_logprobs(kit, module, generated, prompt, *, temperature=1.0, atol=2e-5):
    answer = kit.completion(generated)
    expected = kit.plain_logprobs(module, prompt, answer, temperature=temperature)
    np.testing.assert_allclose(kit.logprobs(generated), expected, atol=atol, rtol=0)


def wait_for(condition, timeout_s=10.0):
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


# -- what is generated ------------------------------------------------------------------------------------------------


def test_a_group_larger_than_the_slots_still_prefills_once(kit, make):
    engine = make(kit.FakeModel(stop_ids=NEVER), max_in_flight=3)
    prompt = kit.ragged(1, low=20, high=21)[0]
    # Each sample of 8 ends while its group is in flight, so the prompt is always at hand in some slot but at the
    # moments at which all three end together.
    results = engine.submit([kit.request("a", prompt, num_samples=8, max_units=6)])[0].result(20)
    assert engine.stats().prompt_units == 3 * len(prompt)
    for generated in results:
        check_logprobs(kit, kit.reference(), generated, prompt)


def test_a_shared_prompt_may_fill_the_cache_to_its_capacity(kit, make):
    engine = make(kit.FakeModel(stop_ids=NEVER), cache_step=8)
    prompt = kit.ragged(1, low=16, high=17)[0]
    for generated in engine.submit([kit.request("a", prompt, num_samples=3, max_units=4)])[0].result(20):
        check_logprobs(kit, kit.reference(), generated, prompt)


def test_mixed_sampling_in_one_batch(kit, make):
    engine = make(max_in_flight=8)
    module = kit.reference()
    prompts = kit.ragged(6, seed=2)
    kinds = [
        {"temperature": 0.0},
        {"temperature": 0.5},
        {"temperature": 1.0},
        {"top_k": 3},
        {"top_p": 0.3},
        {"temperature": 2.0, "top_k": 10, "top_p": 0.8},
    ]
    handles = engine.submit(
        [
            kit.request(i, p, seed=i, max_units=12, **kind)
            for i, (p, kind) in enumerate(zip(prompts, kinds, strict=True))
        ]
    )
    results = [handle.result(20)[0] for handle in handles]
    for index, temperature in ((0, 1.0), (1, 0.5), (2, 1.0)):
        check_logprobs(kit, module, results[index], prompts[index], temperature=temperature)
    answer = kit.completion(results[3])
    with torch.no_grad():
        ids = torch.tensor([prompts[3] + answer])
        logits = module(input_ids=ids).logits[0, len(prompts[3]) - 1 : -1]
    best = logits.topk(3, -1)
    assert all(token in row for token, row in zip(answer, best.indices.tolist(), strict=True))
    renormalised = torch.log_softmax(best.values, -1)
    chosen = [row.index(token) for token, row in zip(answer, best.indices.tolist(), strict=True)]
    expected = renormalised.gather(1, torch.tensor(chosen)[:, None])[:, 0]
    np.testing.assert_allclose(kit.logprobs(results[3]), expected.numpy(), atol=2e-5)


def test_a_prompt_that_is_half_in_the_cache_at_an_update_is_of_one_version(kit, make, monkeypatch):
    """What shares it later would else use something of the old weights."""
    paused = kit.pause_when(monkeypatch, lambda engine: engine.stats().prompt_units > 8)
    engine = make(kit.FakeModel(stop_ids=NEVER), prefill_units=4)
    prompt = kit.ragged(1, low=60, high=61)[0]
    (handle,) = engine.submit([kit.request("a", prompt, num_samples=3, max_units=6)])
    assert paused.wait(20)
    assert engine.stats().generated_units == 0
    changed = kit.reference(seed=2)
    kit.load(engine, changed, version=1)
    engine.resume()
    for generated in handle.result(20):
        check_logprobs(kit, changed, generated, prompt)


def test_a_version_that_is_loaded_again_shares_no_prompt_with_what_was_loaded_before(kit, make, monkeypatch):
    paused = kit.pause_when(monkeypatch, lambda engine: engine.stats().generated_units >= 4)
    engine = make(kit.FakeModel(stop_ids=NEVER), max_in_flight=2)
    prompt = kit.ragged(1, low=20, high=21)[0]
    # The second sample starts when the short request has ended, while the first one still holds the prompt.
    requests = [kit.request("short", [4, 5], max_units=10), kit.request("group", prompt, num_samples=2, max_units=40)]
    handles = engine.submit(requests)
    assert paused.wait(20)
    assert engine.stats().num_waiting == 1
    changed = kit.reference(seed=2)
    kit.load(engine, changed, version=0)
    engine.resume()
    check_logprobs(kit, changed, handles[1].result(20)[1], prompt)


# -- pauses -------------------------------------------------------------------------------------------------------


def test_a_paused_engine_sleeps(kit, make, monkeypatch):
    paused = kit.pause_when(monkeypatch, lambda engine: engine.stats().generated_units >= 5)
    engine = make(kit.FakeModel(stop_ids=NEVER))
    engine.submit([kit.request("a", [4, 5], max_units=60)])
    assert paused.wait(10)
    clock = time.pthread_getcpuclockid(engine._thread.ident)
    before = time.clock_gettime(clock)
    time.sleep(0.2)
    assert time.clock_gettime(clock) - before < 0.05
    assert engine.stats().num_running == 1


# -- errors -------------------------------------------------------------------------------------------------------


def test_a_refusal_names_the_request_and_what_is_wrong(kit, engine):
    for prompt, sampling, message in [
        ([], {}, "the prompt is empty"),
        ([4, 97], {}, "token ids 4 to 97 of its prompt do not fit a vocabulary of 97"),
        ([4] * 100, {"max_units": 29}, "a prompt of 100 and a completion of up to 29 units do not fit .* 128"),
        ([4], {"top_p": 0.0}, "top_p 0.0"),
    ]:
        with pytest.raises(EngineError, match=f"request 'bad'.*{message}"):
            engine.submit([kit.request("bad", prompt, **{"max_units": 4, **sampling})])


def test_a_score_needs_a_temperature(kit, engine):
    with pytest.raises(EngineError, match="temperature 0"):
        engine.score([kit.payload_of([4, 5], [6])], temperature=0)


def test_units_that_the_model_does_not_know_are_not_scored(kit, engine):
    for prompt, completion in [([4, 97], [6]), ([4], [6, -1])]:
        with pytest.raises(EngineError, match=r"payload 1 to score: token ids .* do not fit a vocabulary of 97"):
            engine.score([kit.payload_of([4], [5]), kit.payload_of(prompt, completion)], temperature=1.0)
        engine.health()


def dialogue_of(kit, prompt, completion, decided):
    payload = kit.payload_of(prompt, completion)
    mask = np.asarray(decided)
    told = Array(dtype=mask.dtype.name, shape=mask.shape, data=mask.tobytes())
    return attrs.evolve(payload, arrays={**payload.arrays, "decided": told})


def test_a_dialogue_is_scored_where_the_model_decided(kit, engine):
    prompt, completion = [4, 5, 6], [7, 8, 9, 10, 11, 12]
    decided = [True, True, False, False, True, False]
    payloads = [kit.payload_of([4, 5], [6]), dialogue_of(kit, prompt, completion, decided), kit.payload_of([9], [8, 7])]
    before, scores, after = engine.score(payloads, temperature=0.7)
    expected = kit.plain_logprobs(kit.reference(), prompt, completion, temperature=0.7)
    np.testing.assert_allclose(scores, expected[decided], atol=2e-5, rtol=0)
    assert (before.shape, after.shape) == ((1,), (2,))


def test_a_dialogue_that_does_not_say_who_decided_each_unit_is_not_scored(kit, engine):
    for decided in [[True], [1, 1]]:
        with pytest.raises(EngineError, match="of a completion of 2 units; it is one bool a unit"):
            engine.score([dialogue_of(kit, [4, 5], [6, 7], decided)], temperature=1.0)


def test_a_request_id_in_flight_is_refused(kit, make):
    engine = make(kit.FakeModel(stop_ids=NEVER))
    engine.pause()
    first = engine.submit([kit.request("a", [4], max_units=20)])[0]
    with pytest.raises(EngineError, match="'a' is in flight"):
        engine.submit([kit.request("a", [4])])
    engine.resume()
    first.result(20)
    engine.submit([kit.request("a", [4], max_units=1)])[0].result(20)


def test_a_failure_of_the_thread_reaches_everyone(kit, make, monkeypatch):
    engine = make()
    engine.pause()
    handle = engine.submit([kit.request("a", [4, 5], max_units=9)])[0]

    def broken(*_):
        raise RuntimeError("out of luck")

    monkeypatch.setattr(engine._runner, "step", broken)
    engine.resume()
    with pytest.raises(EngineError, match="RuntimeError: out of luck"):
        handle.result(5)
    wait_for(lambda: not engine._thread.is_alive())
    with pytest.raises(EngineError, match="out of luck") as caught:
        engine.health()
    assert isinstance(caught.value.__cause__, RuntimeError)
    for call in (lambda: engine.submit([kit.request("b", [4])]), engine.pause, engine.resume):
        with pytest.raises(EngineError, match="out of luck"):
            call()


def test_the_cache_of_a_batch_does_not_depend_on_earlier_ones(kit, make):
    engine = make(cache_step=8)
    capacities = []
    for size in (4, 12, 4):
        engine.submit([kit.request("one", [5] * size, max_units=3)])[0].result(5)
        capacities.append(engine._cache.capacity)
    assert capacities == [8, 16, 8]


def test_an_idle_engine_hears_of_the_end_of_a_process_that_it_needs(kit, make):
    engine = make(kit.FakeModel(stop_ids=NEVER))
    engine.submit([kit.request("a", kit.ragged(1)[0], max_units=1)])[0].result(20)
    engine._lose(EngineLostError("worker 1 was ended by signal 9"))
    wait_for(lambda: not engine._thread.is_alive())
    with pytest.raises(EngineLostError, match="worker 1 was ended by signal 9"):
        engine.health()
