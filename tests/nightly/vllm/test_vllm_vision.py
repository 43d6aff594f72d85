"""Images and videos in real vLLM: its own tower, under weights that are written in, against the trainer's forward."""

from __future__ import annotations

import attrs
import numpy as np
import pytest
import torch

from cosmos_core.errors import EngineError
from cosmos_core.models import tokens_payload
from cosmos_core.plugins.selection import PluginSet
from cosmos_core.protocols import FinishReason, ModelContext, Request, Sampling
from cosmos_core.rollout.episodes.dialogue import Dialogue
from cosmos_core.rollout.episodes.recording import encode_turns
from cosmos_core.testing.conformance.engine.subject import Pricer, stopping_at, tokens_of, twin
from cosmos_core.types import Array, Message, Prompt
from cosmos_core.weights.digest import digest_of
from cosmos_model_qwen_vl.tiny import CONFIGS, OPTIONS, data_url, film, picture

from .conftest import TOKENIZER

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(400)]

TOLERANCE = 1e-4
only_one = pytest.mark.parametrize("family", ["qwen3_vl"], indirect=True)
"""For what does not depend on the family: each start of vLLM takes seconds."""


def config_of(family):
    """The tiny model of a family, with heads of a size that vLLM has on a CPU."""
    own = CONFIGS[family]
    rope = {**own["text_config"]["rope_parameters"], "mrope_section": [6, 5, 5]}
    text = {**own["text_config"], "hidden_size": 128, "rope_parameters": rope, "initializer_range": 0.15}
    if "head_dim" in text:
        text["head_dim"] = 32
    return {**own, "text_config": text, "vision_config": {**own["vision_config"], "out_hidden_size": 128}}


@pytest.fixture(scope="module", params=sorted(CONFIGS))
def family(request):
    return request.param


@pytest.fixture(scope="module")
def model(family, tmp_path_factory):
    context = ModelContext(path=None, config=config_of(family), assets=tmp_path_factory.mktemp("seeing"))
    made = PluginSet.load([("model", "qwen-vl")]).create("model", "qwen-vl", OPTIONS, context)
    made.prepare(["Which colour? red, blue and 12 or 34 at 0.5 seconds"], TOKENIZER)
    return made


@pytest.fixture(scope="module")
def pricer(model):
    return Pricer(model, seed=1)


@pytest.fixture
def stills(model):
    """Prompts of text, of one image, and of two."""
    images = [data_url(picture(width, height, seed)) for seed, (width, height) in enumerate(((40, 24), (16, 16)))]
    rows = [
        Prompt(text="How many?"),
        Prompt(text="Which colour?", media=(images[0],)),
        Prompt(text="<image> is not <image>", media=tuple(images)),
    ]
    return [model.encode(row) for row in rows]


@pytest.fixture
def films(model, tmp_path):
    """Prompts of a video, and of two with an image between them."""
    image = data_url(picture(16, 16, 1))
    long, short = film(tmp_path / "long", 5, 24, 16), film(tmp_path / "short", 2, 8, 8)
    rows = [
        Prompt(text="What happens?", media=(long,)),
        Prompt(text="<video>, <image>, <video>: then?", media=(short, image, long)),
    ]
    return [model.encode(row) for row in rows]


def requests(prompts, **sampling):
    return [
        Request(request_id=str(index), prompt=prompt, sampling=Sampling(**sampling), seed=index)
        for index, prompt in enumerate(prompts)
    ]


def looks_of(engine):
    """How many patches the engine's tower looks at, each time that it does."""
    seen = []
    tower = engine.engine._vllm._model.visual
    tower.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(len((*args, *kwargs.values())[0])), with_kwargs=True
    )
    return seen


def logprobs(generated):
    return torch.from_numpy(np.frombuffer(generated.payload.arrays["logprobs"].data, np.float32).copy())


def check_same(generated, pricer, *, temperature=1.0, weights=0):
    (theirs,) = pricer.logprobs([generated.payload], temperature=temperature, weights=weights)
    torch.testing.assert_close(logprobs(generated), theirs, atol=TOLERANCE, rtol=0)


def test_it_sees_what_the_trainer_sees(start, family, stills, films, pricer):
    engine = start()
    prompts = [*stills, *(films if family == "qwen3_vl" else ())]
    greedy = engine.generate(requests(prompts, temperature=0.0, max_units=10))
    for prompt, (generated,) in zip(prompts, greedy, strict=True):
        # Token ids and patches come back as they went in.
        assert {name: generated.payload.arrays[name] for name in prompt.arrays} == prompt.arrays
        check_same(generated, pricer)
        best = pricer.next_logprobs(prompt, [], temperature=1.0)
        assert tokens_of(generated)[0] == int(best.argmax())
        (score,) = engine.score([generated.payload], temperature=1.7)
        (theirs,) = pricer.logprobs([generated.payload], temperature=1.7)
        torch.testing.assert_close(score, theirs, atol=TOLERANCE, rtol=0)


def test_turns_show_images_and_what_the_model_wrote_shows_none(start, model, pricer):
    engine = start()
    row = Prompt(text=(Message(role="user", content="Which colour?"),))
    small, wide = (data_url(picture(width, 16, width)) for width in (16, 40))
    others = [
        Message(role="user", content="Closer:", media=(wide,)),
        Message(role="user", content="this or that?", media=(small, wide), places=(4, 8)),
    ]
    dialogue, written = Dialogue(opening=model.encode(row), model=model), []
    for said in (None, *others):
        if said is not None:
            dialogue.add_observation(encode_turns(model, row, written, [said], sees=True), said)
        prompt = dialogue.so_far()
        ((made,),) = engine.generate(requests([prompt], max_units=6))
        written = dialogue.add_turn(made, "", prompt)
    whole = dialogue.recording.generated(dialogue.opening, FinishReason.STOP, 0, model, 0.0)
    check_same(whole, pricer)
    (score,) = engine.score([whole.payload], temperature=1.0)
    torch.testing.assert_close(score, logprobs(whole), atol=TOLERANCE, rtol=0)
    # A placeholder that the model wrote itself stands for nothing.
    sampled = tokens_payload([5, model.config.image_token_id, 7])
    ((made,),) = engine.generate(requests([model.join([dialogue.so_far(), sampled])], max_units=6))
    check_same(made, pricer)


def test_a_group_looks_once_and_new_weights_look_anew(start, model, stills, pricer):
    engine = start(max_in_flight=8)
    looks = looks_of(engine)
    (shown,) = requests(stills[1:2], temperature=0.7, max_units=6, num_samples=5)
    (before,) = engine.generate([shown])
    assert looks == [60]
    assert len({tuple(tokens_of(generated)) for generated in before}) == 5
    # The tower's weights alone are others now: nothing that was made with the old ones is used again.
    tensors = pricer.tensors(0) | {name: tensor for name, tensor in pricer.tensors(1).items() if ".visual." in name}
    towers = [name for name in tensors if ".visual." in name]
    assert len(towers) > 10
    changed = Pricer(
        twin(model, build=lambda self, **arguments: _with(type(model).build(model, **arguments), tensors)), seed=1
    )
    assert engine.load(1, tensors) == digest_of(tensors)
    (after,) = engine.generate([shown])
    assert looks == [60, 60]
    for generated in before:
        check_same(generated, pricer, temperature=0.7)
    for generated in after:
        check_same(generated, changed, temperature=0.7)
    # Scored by the new ones, too, whoever made it.
    (score,) = engine.score([before[0].payload], temperature=1.0)
    torch.testing.assert_close(score, changed.logprobs([before[0].payload], temperature=1.0)[0], atol=TOLERANCE, rtol=0)


def _with(module, tensors):
    module.load_state_dict(tensors, strict=False)
    return module


@only_one
@pytest.mark.parametrize("cache", ["recompute", "keep"])
def test_an_update_while_images_are_in_flight(start, stills, pricer, cache):
    engine = start(max_in_flight=8)
    handles = engine.submit(requests(stills, max_units=40, num_samples=2))
    engine.pause_in_flight(handles, 60)
    engine.load(3, pricer.tensors(1), cache)
    engine.resume()
    worst = {0: 0.0, 3: 0.0}
    for generated in (each for handle in handles for each in engine.results(handle)):
        versions = np.frombuffer(generated.payload.arrays["versions"].data, np.int32)
        assert set(versions.tolist()) == {0, 3}
        for weights, version in ((0, 0), (1, 3)):
            (theirs,) = pricer.logprobs([generated.payload], temperature=1.0, weights=weights)
            apart = (logprobs(generated) - theirs).abs()[torch.from_numpy(versions == version)].max()
            worst[version] = max(worst[version], float(apart))
    assert worst[0] < TOLERANCE
    assert worst[3] < TOLERANCE if cache == "recompute" else worst[3] > 0.01


@only_one
def test_many_images_at_once_wait_for_one_another(start, model, pricer):
    """More is seen than a step takes: prompts are not parted for it."""
    engine = start({"prefill_units": 64}, max_in_flight=16, context_length=64)
    images = [data_url(picture(40, 24, seed)) for seed in range(16)]
    prompts = [model.encode(Prompt(text="x" * (number % 5), media=(image,))) for number, image in enumerate(images)]
    for (generated,) in engine.generate(requests(prompts, max_units=4)):
        check_same(generated, pricer)


def test_what_does_not_fit_its_prompt_or_cannot_be_shown_is_refused(start, model, family, stills, films):
    engine = start()
    grids = Array(dtype="int32", shape=(1, 3), data=np.asarray([[1, 2, 2]], np.int32).tobytes())
    wrong = attrs.evolve(stills[2], arrays={**stills[2].arrays, "grids": grids})
    with pytest.raises(EngineError, match=r"request '1'.*has 19 placeholders.*'grids': \('int32', 1, 3\)"):
        engine.submit(requests([stills[0], wrong], max_units=2))
    if family == "qwen2_5_vl":
        # vLLM goes on behind the last moment of a video, transformers behind its width: text would be elsewhere.
        with pytest.raises(
            EngineError, match=r"puts unit 19 of its 32 at \[10, 10, 10\], QwenVLModel at \[4, 4, 4\].*show no videos"
        ):
            engine.submit(requests(films[:1], max_units=2))
    assert [generated.num_units for (generated,) in engine.generate(requests(stills, max_units=2))] == [2, 2, 2]


@only_one
def test_a_model_that_does_not_say_what_it_shows_is_refused_its_images(start, model, stills):
    silent = twin(stopping_at(model, frozenset()))
    type(silent).shown = None
    engine = start(model=silent)
    with pytest.raises(EngineError, match=r"request '1'.*does not say what its prompts show.*VisionModel.*'embedded'"):
        engine.submit(requests(stills[:2], max_units=2))


@only_one
def test_another_way_to_turn_positions_is_found_at_start(start, model):
    """The axes of Qwen3-VL take turns; a config that does not say so makes another model of it in vLLM."""
    silent = stopping_at(model, frozenset())
    own = type(model).build

    def build(self, **arguments):
        module = own(self, **arguments)
        del module.config.text_config.rope_parameters["mrope_interleaved"]
        return module

    with pytest.raises(EngineError, match=r"other log-probs of a picture than Qwen3VLForConditionalGeneration"):
        start(model=twin(silent, build=build))
