"""What the embedded engine generates from images and videos, against transformers' own generation and forward."""

import attrs
import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText

from cosmos_core.errors import EngineError
from cosmos_core.models import values
from cosmos_core.models.tokens import token_array, view
from cosmos_core.plugins.selection import PluginSet
from cosmos_core.protocols import EngineContext, FinishReason, Request, Sampling
from cosmos_core.rollout.episodes.dialogue import Dialogue
from cosmos_core.rollout.episodes.recording import encode_turns
from cosmos_core.types import Array, Message, Prompt
from cosmos_core.weights.shards import canonical_tensors
from cosmos_model_qwen_vl.alone import own_inputs, own_logits
from cosmos_model_qwen_vl.tiny import data_url, film, picture

pytestmark = pytest.mark.nightly

CPU = torch.device("cpu")
ROUNDING = 3e-5
"""Of log-probs in float32, in other orders of summation; processors differ in it."""
PIECES = {"whole": {}, "pieces": {"prefill_units": 7, "cache_step": 8}}


@pytest.fixture
def prompts(model, tmp_path):
    images = [data_url(picture(width, height, seed)) for seed, (width, height) in enumerate(((40, 24), (16, 16)))]
    long, short = film(tmp_path / "long", 5, 24, 16), film(tmp_path / "short", 2, 8, 8)
    chat = (Message(role="user", content="What happens?"),)
    rows = [
        Prompt(text="How many?"),
        Prompt(text="Which colour?", media=(images[0],)),
        Prompt(text="<image> is not <image>", media=tuple(images)),
        Prompt(text=chat, media=(long,)),
        Prompt(text="<video>, <image>, <video>: then?", media=(short, images[1], long)),
    ]
    return [model.encode(row) for row in rows]


def ending_in_what_it_shows(model, prompt):
    """The prompt up to its last placeholder: samples that share the rest feed that unit by itself."""
    ids = values(prompt, "prompt")
    size = int(model.vision.tokens.kinds(ids).nonzero()[0].max()) + 1
    return attrs.evolve(prompt, arrays={**prompt.arrays, "prompt": token_array(ids[:size])})


@pytest.fixture
def alone(model, module, tmp_path):
    """What transformers reads back from an export, attending in its own way."""
    model.export(module, tmp_path / "export")
    return AutoModelForImageTextToText.from_pretrained(tmp_path / "export", dtype=torch.float32).eval()


@pytest.fixture
def start(model):
    """Start an engine; it counts how often the tower has run."""
    engines = []

    def started(max_in_flight=4, **options):
        context = EngineContext(
            model=model, dtype=torch.float32, device=CPU, max_in_flight=max_in_flight, context_length=256, seed=0
        )
        engine = PluginSet.load([("engine", "embedded")]).create("engine", "embedded", options, context)
        engine.start()
        engines.append(engine)
        looks = []
        engine._prompts._module.base_model.visual.register_forward_hook(lambda *_: looks.append(1))
        return engine, looks

    yield started
    for engine in engines:
        engine.shutdown()


def requests_of(prompts, **sampling):
    return [
        Request(request_id=str(index), prompt=prompt, sampling=Sampling(**sampling), seed=index)
        for index, prompt in enumerate(prompts)
    ]


def results_of(engine, requests):
    return [handle.result(60) for handle in engine.submit(requests)]


def own_logprobs(model, alone, payload):
    completion = torch.tensor(values(payload, "completion").tolist())
    with torch.no_grad():
        logits_NV = own_logits(alone, model, payload)[len(values(payload, "prompt")) - 1 : -1]
    return logits_NV.log_softmax(-1).gather(1, completion[:, None])[:, 0].numpy()


@pytest.mark.parametrize("options", PIECES.values(), ids=PIECES)
def test_greedy_completions_are_those_of_transformers(model, alone, prompts, start, options):
    engine, _ = start(**options)
    greedy = requests_of(prompts, temperature=0.0, max_units=10)
    for prompt, (made,) in zip(prompts, results_of(engine, greedy), strict=True):
        inputs = own_inputs(model, prompt)
        size = inputs["input_ids"].shape[1]
        expected = alone.generate(
            **inputs,
            attention_mask=torch.ones_like(inputs["input_ids"]),
            do_sample=False,
            max_new_tokens=10,
            eos_token_id=sorted(model.facts().stop_ids),
        )[0, size:]
        assert values(made.payload, "completion").tolist() == expected.tolist()
        np.testing.assert_allclose(
            values(made.payload, "logprobs"), own_logprobs(model, alone, made.payload), atol=ROUNDING, rtol=0
        )


@pytest.mark.parametrize("options", PIECES.values(), ids=PIECES)
def test_samples_have_the_log_probs_of_transformers_and_of_the_trainer(model, alone, prompts, start, options):
    engine, looks = start(**options)
    module = model.build(seed=0, dtype=torch.float32, device=CPU)
    results = results_of(engine, requests_of(prompts, max_units=8, num_samples=3))
    # Each request that shows something was looked at once: not for a sample, nor for a piece.
    assert len(looks) == 4
    payloads = [made.payload for group in results for made in group]
    assert len({values(payload, "completion").tobytes() for payload in payloads[3:6]}) == 3
    scores = engine.score(payloads, temperature=0.7)
    for payload, score in zip(payloads, scores, strict=True):
        expected = own_logprobs(model, alone, payload)
        np.testing.assert_allclose(values(payload, "logprobs"), expected, atol=ROUNDING, rtol=0)
        (batch,) = model.pack([payload], budget=1000)
        with torch.no_grad():
            decided = model.decide(module, batch, temperature=1.0).logprobs_N
            warm = model.decide(module, batch, temperature=0.7).logprobs_N
        np.testing.assert_allclose(decided.numpy(), expected, atol=ROUNDING, rtol=0)
        np.testing.assert_allclose(score.numpy(), warm.numpy(), atol=ROUNDING, rtol=0)


def test_samples_that_wait_for_a_slot_need_no_other_look(model, alone, prompts, start):
    engine, looks = start(max_in_flight=1)
    ((*group,),) = results_of(engine, requests_of(prompts[1:2], max_units=6, num_samples=4))
    assert len(looks) == 1
    assert engine._prompts._features == {}
    for made in group:
        expected = own_logprobs(model, alone, made.payload)
        np.testing.assert_allclose(values(made.payload, "logprobs"), expected, atol=ROUNDING, rtol=0)


def test_the_last_unit_of_a_prompt_may_be_of_what_it_shows(model, alone, prompts, start):
    engine, looks = start(max_in_flight=2)
    prompt = ending_in_what_it_shows(model, prompts[1])
    # One of words alone makes room for a second sample while the first goes on: that feeds the last unit by itself.
    short, shown = requests_of([prompts[0], prompt], max_units=9, num_samples=3)
    short = attrs.evolve(short, sampling=Sampling(max_units=3))
    (_, results) = results_of(engine, [short, shown])
    assert len(looks) == 1
    for made in results:
        expected = own_logprobs(model, alone, made.payload)
        np.testing.assert_allclose(values(made.payload, "logprobs"), expected, atol=ROUNDING, rtol=0)


@pytest.mark.parametrize("cache", ["keep", "recompute"])
def test_new_weights_of_the_tower_are_looked_through(model, module, prompts, start, cache):
    """Under a recomputed cache what follows is that of the new weights alone, the tower's among them."""
    engine, looks = start()
    changed = model.build(seed=9, dtype=torch.float32, device=CPU)
    engine.pause()
    (handle,) = engine.submit(requests_of(prompts[1:2], max_units=40, num_samples=2))
    engine.resume()
    while engine.stats().generated_units < 6:
        pass
    engine.pause()
    engine.begin_update(1)
    tensors = canonical_tensors(changed)
    for piece, _ in engine.layout()[0]:
        engine.write(0, piece, tensors[piece.name])
    engine.commit_update(cache)
    engine.resume()
    for made in handle.result(60):
        new = values(made.payload, "versions") == 1
        (batch,) = model.pack([made.payload], budget=1000)
        with torch.no_grad():
            before, after = (model.decide(each, batch, temperature=1.0).logprobs_N for each in (module, changed))
        found = values(made.payload, "logprobs")
        assert new.any()
        assert not new.all()
        np.testing.assert_allclose(found[~new], before.numpy()[~new], atol=ROUNDING, rtol=0)
        apart = np.abs(found - after.numpy())[new].max()
        assert apart < ROUNDING if cache == "recompute" else apart > 1e-3
    assert len(looks) == (2 if cache == "recompute" else 1)


def test_a_completion_keeps_what_its_prompt_shows(prompts, start):
    engine, _ = start()
    for prompt, (made,) in zip(prompts, results_of(engine, requests_of(prompts, max_units=2)), strict=True):
        for name, array in prompt.arrays.items():
            assert made.payload.arrays[name] is array


def test_what_does_not_fit_its_prompt_is_refused_when_it_comes(prompts, start):
    engine, _ = start()
    grids = Array(dtype="int32", shape=(1, 3), data=np.asarray([[1, 2, 2]], np.int32).tobytes())
    wrong = attrs.evolve(prompts[2], arrays={**prompts[2].arrays, "grids": grids})
    with pytest.raises(EngineError, match=r"request '1'.*has 19 placeholders.*'grids': \('int32', 1, 3\)"):
        engine.submit(requests_of([prompts[0], wrong], max_units=2))
    results_of(engine, requests_of(prompts, max_units=2))


def test_dialogues_that_show_images_have_the_log_probs_of_the_trainer(model, module, start):
    engine, _ = start(prefill_units=7)
    row = Prompt(text=(Message(role="user", content="Is <image> red?"),), media=(data_url(picture(40, 24, 1)),))
    dialogue, written = Dialogue(opening=model.encode(row), model=model), []
    for number, media in enumerate([(), (data_url(picture(16, 16, 2)), data_url(picture(24, 40, 3)))]):
        if media:
            said = Message(role="user", content="or so?", media=media, places=(0, 3))
            dialogue.add_observation(encode_turns(model, row, written, [said], sees=True), said)
        request = Request(request_id=str(number), prompt=dialogue.so_far(), sampling=Sampling(max_units=8), seed=number)
        ((made,),) = results_of(engine, [request])
        written = dialogue.add_turn(made, "", request.prompt)
    payload = dialogue.recording.generated(dialogue.opening, FinishReason.STOP, 0, model, 0.0).payload
    assert len(view(payload, "grids")) == 3
    (batch,) = model.pack([payload], budget=1000)
    with torch.no_grad():
        expected = model.decide(module, batch, temperature=1.0).logprobs_N.numpy()
    np.testing.assert_allclose(values(payload, "logprobs"), expected, atol=ROUNDING, rtol=0)
    (score,) = engine.score([payload], temperature=1.0)
    np.testing.assert_allclose(score.numpy(), expected, atol=ROUNDING, rtol=0)
