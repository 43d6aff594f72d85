"""New weights while 64 sequences are in flight in real vLLM, against the trainer's own forward."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cosmos_core.errors import EngineError
from cosmos_core.protocols import FinishReason, Request, Sampling
from cosmos_core.testing.conformance.engine.subject import tokens_of
from cosmos_core.types import Prompt
from cosmos_core.weights.digest import digest_of

from .conftest import TEXTS, make_model

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(400)]

TOLERANCE = 1e-4
NUM_UNITS = 96


def requests(model, count, *, num_units=NUM_UNITS, num_samples=1, text=""):
    sampling = Sampling(temperature=0.7, max_units=num_units, num_samples=num_samples)
    return [
        Request(
            request_id=str(index),
            prompt=model.encode(Prompt(text=text or f"{TEXTS[index % len(TEXTS)]} {index}")),
            sampling=sampling,
            seed=index,
        )
        for index in range(count)
    ]


def logprobs(generated):
    return torch.from_numpy(np.frombuffer(generated.payload.arrays["logprobs"].data, np.float32).copy())


def versions(generated):
    return np.frombuffer(generated.payload.arrays["versions"].data, np.int32)


@pytest.mark.parametrize("cache", ["recompute", "keep"])
def test_an_update_under_64_sequences_in_flight(start, model, pricer, cache):
    engine = start(max_in_flight=64)
    handles = engine.submit(requests(model, 64))
    before = engine.pause_in_flight(handles, 64 * NUM_UNITS // 3)
    assert engine.stats().num_running == 64
    assert engine.load(5, pricer.tensors(1), cache) == digest_of(pricer.tensors(1))
    engine.resume()
    results = [generated for handle in handles for generated in engine.results(handle)]

    # None lost, none restarted: what there was before the update is there, and nothing was made twice.
    assert [(each.num_units, each.reason) for each in results] == [(NUM_UNITS, FinishReason.LENGTH)] * 64
    assert engine.stats().generated_units == 64 * NUM_UNITS
    made = np.stack([versions(each) for each in results])
    assert set(made.ravel().tolist()) == {0, 5}
    assert (made == 0).sum() == before
    assert (np.diff(made, axis=1) >= 0).all()

    for weights, version in ((0, 0), (1, 5)):
        payloads = [each.payload for each in results]
        trainers = pricer.logprobs(payloads, temperature=0.7, weights=weights)
        apart = torch.stack([logprobs(each) - theirs for each, theirs in zip(results, trainers, strict=True)]).abs()
        worst = apart[torch.from_numpy(made == version)].max()
        if version == 0 or cache == "recompute":
            assert worst < TOLERANCE
        else:
            # What was cached under the old weights still counts, and that is what was drawn from.
            assert worst > 0.1


def test_a_group_shares_the_whole_blocks_of_its_prompt(start, model):
    engine = start({"block_size": 32}, max_in_flight=8)
    (request,) = requests(model, 1, num_samples=8, num_units=2, text="Once upon a time there was " * 6)
    size = request.prompt.arrays["prompt"].shape[0]
    shared = size // 32 * 32
    assert shared >= 64
    engine.generate([request])
    assert engine.stats().prompt_units == size + 7 * (size - shared)


def test_blocks_of_a_prompt_are_not_shared_over_an_update(start, model, pricer):
    engine = start()
    prompts = requests(model, 2, num_units=8, text="Once upon a time there was " * 6)
    engine.generate(prompts)
    engine.load(1, pricer.tensors(1))
    for (generated,) in engine.generate(prompts):
        (theirs,) = pricer.logprobs([generated.payload], temperature=0.7, weights=1)
        torch.testing.assert_close(logprobs(generated), theirs, atol=TOLERANCE, rtol=0)


def test_what_is_in_flight_stands_still_while_others_are_scored(start, model, pricer):
    engine = start()
    handles = engine.submit(requests(model, 6))
    engine.wait_for_units(40)
    (first,) = engine.results(
        engine.submit(
            [
                Request(
                    request_id="first",
                    prompt=model.encode(Prompt(text="first")),
                    sampling=Sampling(max_units=3),
                    seed=9,
                    priority=-1,
                )
            ]
        )[0]
    )
    engine.pause_in_flight(handles[4:], 0)
    made = engine.stats().generated_units
    (scores,) = engine.score([first.payload], temperature=1.7)
    assert engine.stats().generated_units == made
    torch.testing.assert_close(scores, pricer.logprobs([first.payload], temperature=1.7)[0], atol=TOLERANCE, rtol=0)
    engine.resume()
    for handle in handles:
        (generated,) = engine.results(handle)
        (theirs,) = pricer.logprobs([generated.payload], temperature=0.7)
        assert generated.num_units == NUM_UNITS
        torch.testing.assert_close(logprobs(generated), theirs, atol=TOLERANCE, rtol=0)


def test_a_sequence_as_long_as_the_context_is_generated_and_scored(start, model, pricer):
    engine = start()
    prompt = model.encode(Prompt(text="x"))
    size = prompt.arrays["prompt"].shape[0]
    ((whole,),) = engine.generate(
        [Request(request_id="whole", prompt=prompt, sampling=Sampling(max_units=256 - size), seed=1)]
    )
    assert whole.num_units == 256 - size
    (scores,) = engine.score([whole.payload], temperature=1.0)
    torch.testing.assert_close(scores, pricer.logprobs([whole.payload], temperature=1.0)[0], atol=TOLERANCE, rtol=0)


def test_one_wrong_value_changes_the_digest(start, pricer):
    engine = start()
    wrong = {name: tensor.clone() for name, tensor in pricer.tensors(1).items()}
    wrong["model.layers.1.self_attn.k_proj.weight"][3, 5] += 1.0
    assert engine.load(1, pricer.tensors(1)) == digest_of(pricer.tensors(1))
    assert engine.load(1, wrong) == digest_of(wrong) != digest_of(pricer.tensors(1))


def test_a_cache_that_holds_less_than_what_is_in_flight_loses_nothing(start, model, pricer):
    # 16 blocks of 32 units for 8 sequences of more than 96.
    engine = start({"cache_gib": 16 * 32 * 256 * 4 / 2**30}, max_in_flight=8)
    results = engine.generate(requests(model, 8, num_units=150))
    for (generated,) in results:
        (theirs,) = pricer.logprobs([generated.payload], temperature=0.7)
        assert len(tokens_of(generated)) == 150
        torch.testing.assert_close(logprobs(generated), theirs, atol=TOLERANCE, rtol=0)


def test_a_second_engine_of_a_process_is_refused_and_leaves_the_first_alone(start, model):
    engine = start()
    with pytest.raises(EngineError, match="lives in this process already"):
        start()
    with pytest.raises(EngineError, match="lives in this process already"):
        start()
    assert [each.num_units for (each,) in engine.generate(requests(model, 2))] == [NUM_UNITS] * 2


def test_prompts_of_many_requests_at_once_wait_for_one_another(start, model, pricer):
    engine = start({"prefill_units": 64}, max_in_flight=64, context_length=128)
    results = engine.generate(requests(model, 64, num_units=8))
    for (generated,) in results:
        (theirs,) = pricer.logprobs([generated.payload], temperature=0.7)
        torch.testing.assert_close(logprobs(generated), theirs, atol=TOLERANCE, rtol=0)


def test_a_model_that_vllm_does_not_serve_is_refused_with_its_reason(start, tmp_path):
    odd = make_model(tmp_path, head_dim=24)
    with pytest.raises(
        EngineError, match=r"does not serve Qwen3ForCausalLM of this config.*heads have 32.*head_dim=24"
    ):
        start(model=odd)


def test_untied_embeddings_biases_and_other_families(start, tmp_path):
    family = {"model_type": "qwen2", "tie_word_embeddings": False, "head_dim": 32, "hidden_size": 128}
    other = make_model(tmp_path, **family)
    from cosmos_core.testing.conformance.engine.subject import Pricer, stopping_at

    pricer = Pricer(other, seed=1)
    engine = start(model=stopping_at(other, frozenset()))
    assert engine.load(1, pricer.tensors(2)) == digest_of(pricer.tensors(2))
    ((generated,),) = engine.generate(requests(other, 1))
    (theirs,) = pricer.logprobs([generated.payload], temperature=0.7, weights=2)
    torch.testing.assert_close(logprobs(generated), theirs, atol=TOLERANCE, rtol=0)
