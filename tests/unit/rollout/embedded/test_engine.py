from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch

from cosmos_core.errors import EngineError, WeightSyncError
from cosmos_core.protocols import FinishReason
from cosmos_core.rollout.embedded import engine as engine_module
from cosmos_core.weights.digest import digest_of

NEVER = frozenset()


def check_logprobs(kit, module, generated, prompt, *, temperature=1.0, atol=2e-5):
    answer = kit.completion(generated)
    expected = kit.plain_logprobs(module, prompt, answer, temperature=temperature)
    np.testing.assert_allclose(kit.logprobs(generated), expected, atol=atol, rtol=0)


def load(engine, module, version, cache="keep"):
    engine.begin_update(version)
    tensors = dict(module.named_parameters())
    for piece, _ in engine.layout()[0]:
        engine.write(0, piece, tensors[piece.name].detach())
    return engine.commit_update(cache)


def wait_for(condition, timeout_s=10.0):
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


# -- what is generated ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize("prefill_units", [2048, 7])
def test_logprobs_are_those_of_transformers_in_mixed_batches(kit, make, family, prefill_units):
    model = kit.FakeModel() if family == "qwen3" else kit.llama()
    engine = make(model, prefill_units=prefill_units, cache_step=8)
    prompts = kit.ragged(12)
    requests = [
        kit.request(i, prompt, seed=i, max_units=3 + 2 * i, num_samples=1 + i % 3) for i, prompt in enumerate(prompts)
    ]
    handles = engine.submit(requests[:5])
    handles += [engine.submit([late])[0] for late in requests[5:]]
    module = kit.reference(model)
    for prompt, handle, request in zip(prompts, handles, requests, strict=True):
        results = handle.result(20)
        assert len(results) == request.sampling.num_samples
        for generated in results:
            check_logprobs(kit, module, generated, prompt, atol=1e-5)
            answer = kit.completion(generated)
            stopped = answer[-1] == kit.STOP
            assert generated.reason is (FinishReason.STOP if stopped else FinishReason.LENGTH)
            assert stopped or len(answer) == request.sampling.max_units
            assert kit.STOP not in answer[:-1]
            assert generated.num_units == len(answer)


def test_greedy_equals_generate(kit, make):
    engine = make(prefill_units=10)
    module = kit.reference()
    prompts = kit.ragged(10, seed=3)
    handles = engine.submit([kit.request(i, prompt, temperature=0.0, max_units=25) for i, prompt in enumerate(prompts)])
    for prompt, handle in zip(prompts, handles, strict=True):
        ids = torch.tensor([prompt])
        expected = module.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=25, do_sample=False, pad_token_id=0
        )[0, len(prompt) :].tolist()
        assert kit.completion(handle.result(20)[0]) == expected


def test_a_request_draws_the_same_alone_and_among_others(kit, make):
    prompt = kit.ragged(1, seed=9)[0]
    options = {"seed": 5, "max_units": 30, "num_samples": 4}
    alone = [kit.completion(one) for one in make().submit([kit.request("x", prompt, **options)])[0].result(20)]
    assert len({tuple(answer) for answer in alone}) == 4
    crowded = make(max_in_flight=5, prefill_units=9)
    others = [kit.request(i, p, seed=i, max_units=17, num_samples=3) for i, p in enumerate(kit.ragged(8))]
    handles = crowded.submit([*others[:4], kit.request("x", prompt, **options), *others[4:]])
    assert [kit.completion(one) for one in handles[4].result(20)] == alone


def test_another_seed_draws_otherwise(kit, engine):
    prompt = kit.ragged(1)[0]
    handles = engine.submit([kit.request(i, prompt, seed=i, max_units=20) for i in range(4)])
    assert len({tuple(kit.completion(handle.result(20)[0])) for handle in handles}) == 4


def test_a_group_prefills_its_prompt_once(kit, make):
    engine = make(max_in_flight=16)
    prompt = kit.ragged(1, low=20, high=21)[0]
    engine.submit([kit.request("a", prompt, num_samples=16, max_units=4)])[0].result(20)
    assert engine.stats().prompt_units == len(prompt)


def test_a_group_larger_than_the_slots_still_prefills_once(kit, make):
    engine = make(kit.FakeModel(stop_ids=NEVER), max_in_flight=3)
    prompt = kit.ragged(1, low=20, high=21)[0]
    # Each sample of 8 ends while its group is in flight, so the prompt is always at hand in some slot but at the
    # moments at which all three end together.
    results = engine.submit([kit.request("a", prompt, num_samples=8, max_units=6)])[0].result(20)
    assert engine.stats().prompt_units == 3 * len(prompt)
    for generated in results:
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


def test_score_is_the_forward_of_the_loaded_weights(kit, make):
    engine = make(kit.FakeModel(stop_ids=NEVER), prefill_units=40)
    prompts = kit.ragged(6)
    results = [h.result(20)[0] for h in engine.submit([kit.request(i, p, max_units=9) for i, p in enumerate(prompts)])]
    for temperature in (1.0, 0.7):
        scores = engine.score([generated.payload for generated in results], temperature=temperature)
        for score, prompt, generated in zip(scores, prompts, results, strict=True):
            expected = kit.plain_logprobs(kit.reference(), prompt, kit.completion(generated), temperature=temperature)
            np.testing.assert_allclose(score.numpy(), expected, atol=1e-5, rtol=0)
    with pytest.raises(EngineError, match="temperature 0"):
        engine.score([results[0].payload], temperature=0)


def test_priority_goes_first(kit, make):
    engine = make(kit.FakeModel(stop_ids=NEVER), max_in_flight=1)
    order = []
    engine.pause()
    for name, priority in (("late", 5), ("soon", -1), ("middle", 0)):
        handle = engine.submit([kit.request(name, [4, 5], priority=priority, max_units=3)])[0]
        handle.add_done_callback(lambda done: order.append(done.request.request_id))
    engine.resume()
    wait_for(lambda: len(order) == 3)
    assert order == ["soon", "middle", "late"]


# -- pauses and aborts --------------------------------------------------------------------------------------------


def slow(monkeypatch, delay_s=0.002):
    """Make steps long enough to be interrupted."""
    step = engine_module.EmbeddedEngine._step

    def delayed(self):
        time.sleep(delay_s)
        step(self)

    monkeypatch.setattr(engine_module.EmbeddedEngine, "_step", delayed)


def test_pause_keep_holds_what_is_in_flight_and_sleeps(kit, make, monkeypatch):
    slow(monkeypatch)
    engine = make(kit.FakeModel(stop_ids=NEVER))
    prompt = kit.ragged(1)[0]
    handle = engine.submit([kit.request("a", prompt, max_units=60)])[0]
    wait_for(lambda: engine.stats().generated_units >= 5)
    engine.pause("keep")
    frozen, cpu = engine.stats().generated_units, time.thread_time()
    process = time.process_time()
    time.sleep(0.2)
    assert engine.stats().generated_units == frozen < 60
    assert engine.stats().num_running == 1
    assert engine.stats().paused_s >= 0.2
    assert time.process_time() - process - (time.thread_time() - cpu) < 0.05
    with pytest.raises(TimeoutError):
        handle.result(0.01)
    engine.resume()
    generated = handle.result(20)[0]
    assert generated.num_units == 60
    check_logprobs(kit, kit.reference(), generated, prompt)


def test_pause_abort_ends_running_and_waiting_with_partials(kit, make, monkeypatch):
    slow(monkeypatch)
    engine = make(kit.FakeModel(stop_ids=NEVER), max_in_flight=2)
    prompts = kit.ragged(4)
    handles = engine.submit([kit.request(i, p, max_units=90) for i, p in enumerate(prompts)])
    wait_for(lambda: engine.stats().generated_units >= 10)
    engine.pause("abort")
    results = [handle.result(0)[0] for handle in handles]
    assert {generated.reason for generated in results} == {FinishReason.ABORTED}
    assert [generated.num_units > 0 for generated in results] == [True, True, False, False]
    for generated, prompt in zip(results[:2], prompts, strict=False):
        check_logprobs(kit, kit.reference(), generated, prompt)
    assert engine.stats().num_running == engine.stats().num_waiting == 0
    held = engine.submit([kit.request("later", prompts[0], max_units=2)])[0]
    time.sleep(0.05)
    assert engine.stats().generated_units == sum(generated.num_units for generated in results)
    engine.resume()
    assert held.result(20)[0].num_units == 2


def test_pause_wait_finishes_what_is_in_flight_and_holds_the_rest(kit, make, monkeypatch):
    slow(monkeypatch)
    engine = make(kit.FakeModel(stop_ids=NEVER), max_in_flight=2)
    first = engine.submit([kit.request(i, p, max_units=20) for i, p in enumerate(kit.ragged(5))])
    pausing = threading.Thread(target=engine.pause, args=("wait",))
    pausing.start()
    time.sleep(0.02)
    late = engine.submit([kit.request("late", [4, 5], max_units=3)])[0]
    pausing.join(20)
    assert all(handle.result(0)[0].num_units == 20 for handle in first)
    assert engine.stats().generated_units == 100
    assert engine.stats().num_waiting == 1
    with pytest.raises(TimeoutError):
        late.result(0.05)
    engine.resume()
    assert late.result(20)[0].num_units == 3


def test_abort_keeps_partials_and_leaves_the_rest(kit, make, monkeypatch):
    slow(monkeypatch)
    engine = make(kit.FakeModel(stop_ids=NEVER))
    prompts = kit.ragged(3)
    handles = engine.submit([kit.request(i, p, seed=i, max_units=50) for i, p in enumerate(prompts)])
    wait_for(lambda: engine.stats().generated_units >= 12)
    engine.abort(["1", "unknown"])
    aborted = handles[1].result(5)[0]
    assert aborted.reason is FinishReason.ABORTED
    assert 0 < aborted.num_units < 50
    assert kit.versions(aborted) == [0] * aborted.num_units
    check_logprobs(kit, kit.reference(), aborted, prompts[1])
    for index in (0, 2):
        generated = handles[index].result(20)[0]
        assert generated.num_units == 50
        check_logprobs(kit, kit.reference(), generated, prompts[index])


def test_shutdown_ends_what_is_in_flight_as_aborted(kit, make, monkeypatch):
    slow(monkeypatch)
    engine = make(kit.FakeModel(stop_ids=NEVER))
    handle = engine.submit([kit.request("a", [4, 5], max_units=90)])[0]
    wait_for(lambda: engine.stats().generated_units >= 2)
    engine.shutdown()
    engine.shutdown()
    assert handle.result(0)[0].reason is FinishReason.ABORTED
    with pytest.raises(EngineError, match="shut down"):
        engine.submit([kit.request("b", [4, 5])])
    with pytest.raises(EngineError, match="shut down"):
        engine.health()


def test_callbacks_may_use_the_engine(kit, engine):
    finished = []

    def again(handle):
        if handle.request.request_id != "3":
            following = str(int(handle.request.request_id) + 1)
            engine.submit([kit.request(following, [5, 6], max_units=2)])[0].add_done_callback(again)
        engine.abort(["nothing"])
        finished.append(engine.stats().num_running)

    engine.submit([kit.request("0", [4, 5], max_units=2)])[0].add_done_callback(again)
    wait_for(lambda: len(finished) == 4)


# -- weights ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cache", ["keep", "recompute"])
@pytest.mark.parametrize("prefill_units", [2048, 11])
def test_update_in_flight_loses_and_restarts_nothing(kit, make, monkeypatch, cache, prefill_units):
    slow(monkeypatch)
    engine = make(kit.FakeModel(stop_ids=NEVER), max_in_flight=6, prefill_units=prefill_units)
    prompts = kit.ragged(5)
    requests = [kit.request(i, p, seed=i, max_units=40, num_samples=2) for i, p in enumerate(prompts)]
    handles = engine.submit(requests)
    modules = {0: kit.reference()}
    for version in (3, 4):
        wait_for(lambda floor=60 * (version - 2): engine.stats().generated_units >= floor)
        modules[version] = kit.reference(seed=version)
        digest = load(engine, modules[version], version, cache)
        assert digest == digest_of(dict(modules[version].named_parameters()))
        assert engine.stats().weight_version == version
    seen = set()
    for handle, prompt in zip(handles, prompts, strict=True):
        for generated in handle.result(20):
            versions, answer = kit.versions(generated), kit.completion(generated)
            assert len(versions) == len(answer) == 40
            assert versions == sorted(versions)
            assert (generated.oldest_version, generated.newest_version) == (versions[0], versions[-1])
            seen.update(versions)
            # Until the first update, and under recompute always, each log-prob is that of its own version.
            exact = [v for v in set(versions) if cache == "recompute" or v == versions[0]]
            for version in exact:
                places = [place for place, made in enumerate(versions) if made == version]
                expected = kit.plain_logprobs(modules[version], prompt, answer)[places]
                np.testing.assert_allclose(kit.logprobs(generated)[places], expected, atol=3e-5, rtol=0)
    assert seen == {0, 3, 4}


def test_a_sample_that_starts_after_an_update_does_not_use_the_old_prompt(kit, make, monkeypatch):
    slow(monkeypatch)
    engine = make(kit.FakeModel(stop_ids=NEVER), max_in_flight=2)
    prompt = kit.ragged(1, low=20, high=21)[0]
    handle = engine.submit([kit.request("a", prompt, max_units=10, num_samples=4)])[0]
    wait_for(lambda: engine.stats().generated_units >= 4)
    new = kit.reference(seed=7)
    load(engine, new, 1)
    results = handle.result(20)
    fresh = [generated for generated in results if generated.oldest_version == 1]
    assert len(fresh) == 2
    for generated in fresh:
        check_logprobs(kit, new, generated, prompt)


def test_an_update_is_a_whole_or_nothing(kit, engine):
    before = engine.score([kit.payload_of([4, 5], [6, 7])], temperature=1.0)[0]
    with pytest.raises(WeightSyncError, match="no update is open"):
        engine.commit_update()
    engine.begin_update(2)
    with pytest.raises(WeightSyncError, match="an update to version 2 is open"):
        engine.begin_update(3)
    piece, _ = engine.layout()[0][0]
    engine.write(0, piece, torch.zeros(piece.shape))
    with pytest.raises(WeightSyncError, match="are not wholly written"):
        engine.commit_update()
    with pytest.raises(WeightSyncError, match="rank 1 does not exist"):
        engine.write(1, piece, torch.zeros(piece.shape))
    engine.abort_update()
    assert engine.stats().weight_version == 0
    after = engine.score([kit.payload_of([4, 5], [6, 7])], temperature=1.0)[0]
    torch.testing.assert_close(before, after, atol=0, rtol=0)
    load(engine, kit.reference(seed=2), 2)
    load(engine, kit.reference(seed=3), 2)
    with pytest.raises(WeightSyncError, match="version 1 is older than 2"):
        engine.begin_update(1)


def test_bf16_takes_updates_in_its_own_dtype(kit, make):
    engine = make(dtype=torch.bfloat16)
    assert {dtype for _, dtype in engine.layout()[0]} == {"bfloat16"}
    module = kit.reference(seed=5).to(torch.bfloat16)
    assert load(engine, module, 1) == digest_of(dict(module.named_parameters()))
    generated = engine.submit([kit.request("a", [4, 5, 6], max_units=8)])[0].result(20)[0]
    assert np.isfinite(kit.logprobs(generated)).all()


# -- errors -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "sampling", "message"),
    [
        ([], {}, "the prompt is empty"),
        ([4, 97], {}, "token ids 4 to 97 do not fit a vocabulary of 97"),
        ([4] * 100, {"max_units": 29}, "a prompt of 100 and a completion of up to 29 units do not fit .* 128"),
        ([4], {"temperature": 0.0, "num_samples": 2}, "2 samples at temperature 0"),
        ([4], {"top_p": 0.0}, "top_p 0.0"),
        ([4], {"temperature": -1.0}, "temperature -1.0"),
    ],
)
def test_a_request_that_cannot_be_is_refused_and_nothing_of_its_call_enters(kit, engine, prompt, sampling, message):
    good = kit.request("good", [4, 5], max_units=2)
    with pytest.raises(EngineError, match=f"request 'bad'.*{message}"):
        engine.submit([good, kit.request("bad", prompt, **{"max_units": 4, **sampling})])
    assert engine.stats().num_waiting == engine.stats().num_running == 0
    assert engine.submit([good])[0].result(20)[0].num_units > 0


def test_a_request_id_in_flight_is_refused(kit, make, monkeypatch):
    slow(monkeypatch)
    engine = make(kit.FakeModel(stop_ids=NEVER))
    first = engine.submit([kit.request("a", [4], max_units=20)])[0]
    with pytest.raises(EngineError, match="'a' is in flight"):
        engine.submit([kit.request("a", [4])])
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


def test_weights_that_overflow_are_told_not_sampled(kit, make):
    engine = make()
    module = kit.reference()
    with torch.no_grad():
        module.model.norm.weight.fill_(float("nan"))
    load(engine, module, 4)
    handle = engine.submit([kit.request("a", [4, 5], max_units=9)])[0]
    with pytest.raises(EngineError, match="not finite at weight version 4"):
        handle.result(5)


def test_the_cache_of_a_batch_does_not_depend_on_earlier_ones(kit, make):
    engine = make(cache_step=8)
    capacities = []
    for size in (4, 12, 4):
        engine.submit([kit.request("one", [5] * size, max_units=3)])[0].result(5)
        capacities.append(engine._cache.capacity)
    assert capacities == [8, 16, 8]
