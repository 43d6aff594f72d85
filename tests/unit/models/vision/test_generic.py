"""Packed rows of the generic vision-language model against transformers' own forward of each document alone."""

import json
from pathlib import Path

import attrs
import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText

from cosmos_core.errors import ConfigError, DataError, PluginIncompatibleError
from cosmos_core.models import HuggingFaceModel, values
from cosmos_core.models.plugin import create
from cosmos_core.models.small import own_logits
from cosmos_core.models.tokens import array_of, tokens_payload
from cosmos_core.models.vision import generic as generic_model
from cosmos_core.models.vision.generic import GenericOptions, GenericVisionModel
from cosmos_core.models.vision.images import load_image
from cosmos_core.protocols import ModelContext
from cosmos_core.types import Message, Prompt
from tests.vision import FAMILIES, checkpoint, own_inputs, own_processor, picture, prompts

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def generic(folder, **options):
    context = ModelContext(path=str(folder), config=None, assets=Path(folder) / "none")
    return create(GenericOptions(**options), context)


def build(model):
    return model.build(seed=0, dtype=torch.float32, device=CPU)


def own_logprobs(alone, given, end):
    logits_NV = alone(**given, use_cache=False).logits[0][-len(end) - 1 : -1]
    return logits_NV.log_softmax(-1).gather(1, end[:, None])[:, 0]


def test_packed_rows_are_what_transformers_gives_of_each_document_alone(subtests, tmp_path):
    for family in FAMILIES:
        with subtests.test(family=family):
            check_packed_rows(checkpoint(tmp_path / family, family))


def check_packed_rows(folder):
    model = generic(folder)
    module, alone = build(model), AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    assert type(model) is GenericVisionModel
    inputs = [own_inputs(own_processor(folder), prompt) for prompt in prompts()]
    payloads = [model.encode_demonstration(prompt) for prompt in prompts()]
    for payload, (given, end) in zip(payloads, inputs, strict=True):
        together = [*values(payload, "prompt").tolist(), *values(payload, "completion").tolist()]
        assert together == given["input_ids"][0].tolist()
        assert values(payload, "completion").tolist() == end.tolist()
    longest = max(len(values(payload, "prompt")) + len(values(payload, "completion")) for payload in payloads)
    for settings in ({"budget": 2000}, {"budget": longest}, {"budget": 2000, "multiple": 16}):
        batches = model.pack(payloads, **settings)
        assert (len(batches) > 1) == (settings["budget"] == longest)
        for batch in batches:
            found = model.decide(module, batch, temperature=1.0).logprobs_N
            expected = torch.cat([own_logprobs(alone, *inputs[index]) for index in batch.sequences])
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    # What is seen matters, and the gradient reaches the tower.
    for payload in payloads:
        (batch,) = model.pack([payload], budget=2000)
        model.decide(module, batch, temperature=1.0).logprobs_N.sum().backward()
    for given, end in inputs:
        own_logprobs(alone, given, end).sum().backward()
    own = dict(alone.named_parameters())
    reached = 0
    for name, parameter in module.named_parameters():
        if own[name].grad is None:
            assert parameter.grad is None or not parameter.grad.any(), name
            continue
        scale = own[name].grad.abs().max().item()
        torch.testing.assert_close(parameter.grad, own[name].grad, atol=2e-5 * max(scale, 1.0), rtol=1e-4, msg=name)
        reached += "vision" in name or "visual" in name
    assert reached > 5


def test_a_sampled_placeholder_is_a_token_as_any_other(tmp_path):
    """A policy may write one; it must not take the place of what another document sees."""
    folder = checkpoint(tmp_path / "qwen2_vl", "qwen2_vl")
    model = generic(folder)
    module = build(model)
    alone = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    processor = own_processor(folder)
    marked = Prompt(text="Say it", demonstration=f"a {processor.image_token} b")
    shown = Prompt(text="<image> then?", demonstration=f"{processor.image_token}!", media=(picture(30, 30),))
    batch_of = [model.encode_demonstration(prompt) for prompt in (marked, prompts()[1], shown)]
    (batch,) = model.pack(batch_of, budget=500)
    found = torch.split(model.decide(module, batch, temperature=1.0).logprobs_N, batch.num_decisions)
    given, end = own_inputs(processor, marked)
    # Without images transformers' model looks for no places.
    torch.testing.assert_close(found[batch.sequences.index(0)], own_logprobs(alone, given, end), atol=1e-5, rtol=0)
    for index in (1, 2):
        (lone,) = model.pack([batch_of[index]], budget=500)
        expected = model.decide(module, lone, temperature=1.0).logprobs_N
        torch.testing.assert_close(found[batch.sequences.index(index)], expected, atol=1e-5, rtol=0)
    # Another image changes what follows it, and no neighbour.
    other = model.encode_demonstration(
        Prompt(text="<image> then?", demonstration=f"{processor.image_token}!", media=(picture(30, 30, 9),))
    )
    (changed,) = model.pack([*batch_of[:2], other], budget=500)
    again = torch.split(model.decide(module, changed, temperature=1.0).logprobs_N, changed.num_decisions)
    assert (again[changed.sequences.index(2)] - found[batch.sequences.index(2)]).abs().max() > 1e-3
    torch.testing.assert_close(again[changed.sequences.index(1)], found[batch.sequences.index(1)], atol=1e-5, rtol=0)


def test_images_that_attend_both_ways_are_refused_before_anything_is_trained(subtests, tmp_path):
    for number, (name, reason) in enumerate(
        [
            ("gemma3", "images of this model need more than causal attention"),
            ("paligemma", "attention to later units: not supported"),
        ]
    ):
        with subtests.test(name=name, reason=reason):
            folder = tmp_path / str(number)
            folder.mkdir()
            model = generic(checkpoint(folder / name, name))
            with pytest.raises(PluginIncompatibleError, match=reason):
                model.encode(Prompt(text="Which?", media=(picture(20, 20),)))


def test_what_deeper_layers_add_is_tried_before_the_first_image(tmp_path, monkeypatch):
    folder = checkpoint(tmp_path / "qwen3_vl", "qwen3_vl")
    config = json.loads((folder / "config.json").read_text())
    config["vision_config"]["deepstack_visual_indexes"] = [1]  # a layer that a small model does not have
    (folder / "config.json").write_text(json.dumps(config))
    whole = generic_model.decoder_inputs
    monkeypatch.setattr(generic_model, "decoder_inputs", lambda *given: attrs.evolve(whole(*given), deeper_KD=()))
    with pytest.raises(PluginIncompatibleError, match="packed logits differ"):
        generic(folder).encode(Prompt(text="Which?", media=(picture(20, 20),)))


def test_a_model_whose_images_are_refused_is_still_one_of_text(tmp_path):
    folder = checkpoint(tmp_path / "gemma3", "gemma3")
    model = generic(folder)
    module = build(model)
    payload = model.encode_demonstration(Prompt(text="Which?", demonstration="red"))
    (batch,) = model.pack([payload], budget=100)
    alone = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor([[*values(payload, "prompt").tolist(), *values(payload, "completion").tolist()]])
    expected = own_logprobs(alone, {"input_ids": ids}, ids[0, -len(values(payload, "completion")) :])
    torch.testing.assert_close(model.decide(module, batch, temperature=1.0).logprobs_N, expected, atol=1e-5, rtol=0)


def test_a_head_of_its_own_is_refused_when_it_is_built(tmp_path):
    with pytest.raises(PluginIncompatibleError, match=r"AyaVisionForConditionalGeneration: .*logits differ"):
        build(generic(checkpoint(tmp_path / "aya_vision", "aya_vision")))


@pytest.fixture(scope="module")
def llava(tmp_path_factory):
    return checkpoint(tmp_path_factory.mktemp("llava") / "llava", "llava")


def test_a_bad_row_is_told(subtests, llava):
    for prompt, message in [
        (
            Prompt(text="<image> or <image>?", media=(picture(9, 9),)),
            "has the marks <image> <image>, and .* are <image>;",
        ),
        (Prompt(text="<video>?", media=(picture(9, 9),)), "has the marks <video>, and .* are <image>"),
        (Prompt(text="?", media=("https://a.org/b.png",)), "nothing is fetched while training"),
        (Prompt(text="?", media=("/nowhere.png",)), "no such file"),
        (Prompt(text="?", media=("data:image/png;base64,AAAA",)), "no readable image"),
    ]:
        with subtests.test(prompt=prompt, message=message), pytest.raises(DataError, match=message):
            generic(llava).encode(prompt)


def test_text_that_has_the_familys_placeholder_in_it_is_told(tmp_path):
    model = generic(checkpoint(tmp_path / "qwen2_vl", "qwen2_vl"))
    with pytest.raises(DataError, match=r"has '<\|image_pad\|>' 2 times, for 1 images"):
        model.encode(Prompt(text="<image> <|image_pad|>", media=(picture(20, 20),)))


def test_images_of_a_chat_without_marks_stand_before_the_first_turn_of_the_user(llava):
    chat = tuple(Message(role=role, content=role) for role in ("system", "user", "assistant", "user"))
    model, image = generic(llava), (picture(20, 20),)
    marked = [turn if index != 1 else Message(role="user", content="<image>user") for index, turn in enumerate(chat)]
    ids = [values(model.encode(Prompt(text=tuple(text), media=image)), "prompt").tolist() for text in (chat, marked)]
    assert ids[0] == ids[1]
    # Without media a mark is text.
    assert "<image>user" in model.tokenizer.decode(values(model.encode(Prompt(text=tuple(marked))), "prompt").tolist())


def test_a_template_that_takes_strings_is_given_strings(subtests, llava):
    for template in [
        "{% for turn in messages %}{{ turn.content }};{% endfor %}",
        "{% for turn in messages %}{{ turn['content'] + ';' }}{% endfor %}",
    ]:
        with subtests.test(template=template):
            model = generic(llava, chat_template=template)
            chat = (Message(role="user", content="a"), Message(role="assistant", content="b <image>"))
            assert model.text.chat_text(Prompt(text=chat[:1])) == "a;"
            shown = model.encode(Prompt(text=chat, media=(picture(20, 20),)))
            plain = generic(llava, add_special_tokens=False).encode(
                Prompt(text="a;b <image>;", media=(picture(20, 20),))
            )
            assert values(shown, "prompt").tolist() == values(plain, "prompt").tolist()


def test_arrays_that_do_not_fit_their_prompt_are_refused(subtests, tmp_path):
    for number, spoiled in enumerate(["media.image_grid_thw", "kinds", "kinds' length"]):
        with subtests.test(spoiled=spoiled):
            folder = tmp_path / str(number)
            folder.mkdir()
            model = generic(checkpoint(folder / "qwen2_vl", "qwen2_vl"))
            prompt = model.encode(Prompt(text="<image> red", media=(picture(20, 20),)))
            wrong = {
                "media.image_grid_thw": np.asarray([[1, 2, 2]]),
                "kinds": np.full(prompt.arrays["prompt"].shape, 2),
                "kinds' length": np.ones(1, np.int64),
            }[spoiled]
            arrays = {**prompt.arrays, spoiled.removesuffix("' length"): array_of(wrong)}
            with pytest.raises(DataError, match=r"does not fit its places|give one for each unit"):
                model.condition(attrs.evolve(prompt, arrays=arrays))


def test_settings_of_images_are_the_processors(tmp_path):
    folder = checkpoint(tmp_path / "qwen2_vl", "qwen2_vl")
    size = {"shortest_edge": 64, "longest_edge": 256}
    payloads = [
        generic(folder, **options).encode(Prompt(text="?", media=(picture(60, 60),)))
        for options in ({}, {"image_options": {"size": size}})
    ]
    large, small = (payload.arrays["media.pixel_values"].shape[0] for payload in payloads)
    assert small <= 16 < large


def test_an_export_is_a_checkpoint_that_encodes_and_evaluates_the_same(tmp_path):
    model = generic(checkpoint(tmp_path / "internvl", "internvl"))
    module = build(model)
    model.config.text_config.dtype = torch.bfloat16
    model.export(module, tmp_path / "export")
    config = json.loads((tmp_path / "export" / "config.json").read_text())
    assert config["dtype"] == config["text_config"]["dtype"] == "float32"
    again = generic(tmp_path / "export")
    for prompt in prompts():
        first, second = model.encode(prompt), again.encode(prompt)
        assert {name: array.data for name, array in first.arrays.items()} == {
            name: array.data for name, array in second.arrays.items()
        }
    payloads = [model.encode_demonstration(prompt) for prompt in prompts()]
    (batch,) = model.pack(payloads, budget=2000)
    found, expected = (
        each.decide(made, batch, temperature=1.0).logprobs_N for each, made in ((again, build(again)), (model, module))
    )
    assert found.equal(expected)


def test_a_config_alone_makes_a_model_of_text_and_says_what_images_need(tmp_path):
    config = json.loads((checkpoint(tmp_path / "llava", "llava") / "config.json").read_text())
    keys = {name: config[name] for name in ("model_type", "vision_config", "image_token_index")}
    text = {name: value for name, value in config["text_config"].items() if name in {"hidden_size", "model_type"}}
    small = {
        **text,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    context = ModelContext(path=None, config={**keys, "text_config": small}, assets=tmp_path / "assets")
    model = create(GenericOptions(), context)
    model.prepare(["red or blue"], {"build": "byte-bpe", "vocab_size": 290, "split_digits": True})
    assert type(model) is GenericVisionModel
    (batch,) = model.pack([model.encode_demonstration(Prompt(text="red", demonstration="blue"))], budget=99)
    assert model.decide(build(model), batch, temperature=1.0).logprobs_N.isfinite().all()
    with pytest.raises(ConfigError, match=r"only the processor of a checkpoint makes tokens of them: give model\.path"):
        model.encode(Prompt(text="red", media=(picture(20, 20),)))


def test_a_checkpoint_without_a_processor_is_one_of_text(tmp_path):
    folder = checkpoint(tmp_path / "llava", "llava")
    (folder / "processor_config.json").unlink()
    model = generic(folder, chat_template="{% for turn in messages %}{{ turn.content }}{% endfor %}")
    with pytest.raises(ConfigError, match=r"with processor_config\.json or preprocessor_config\.json, without"):
        model.encode(Prompt(text="red", media=(picture(20, 20),)))
    chat = model.encode(Prompt(text=(Message(role="user", content="red"),)))
    assert model.tokenizer.decode(values(chat, "prompt").tolist()) == "red"
    model.export(build(model), tmp_path / "export")
    assert type(generic(tmp_path / "export")) is GenericVisionModel


def test_a_processor_that_cannot_be_used_is_told_where_it_is_needed(tmp_path):
    folder = checkpoint(tmp_path / "llava", "llava")
    (folder / "processor_config.json").write_text('{"processor_class": "NoSuchProcessor"}')
    model = generic(folder)
    with pytest.raises(DataError, match="no usable processor of images at"):
        model.encode(Prompt(text="red", media=(picture(20, 20),)))
    model.encode(Prompt(text="red"))
    # What was trained on text is not lost in the end.
    model.export(build(model), tmp_path / "export")
    assert "NoSuch" in (tmp_path / "export" / "processor_config.json").read_text()


def test_a_model_of_text_stays_one(tmp_path, config):
    made = create(GenericOptions(), ModelContext(path=None, config=config, assets=tmp_path))
    assert type(made) is HuggingFaceModel
    assert type(create(GenericOptions(), ModelContext(path=None, config=None, assets=tmp_path))) is HuggingFaceModel


def test_options_of_images_are_refused_for_a_model_that_sees_none(tmp_path, config):
    context = ModelContext(path=None, config=config, assets=tmp_path)
    with pytest.raises(ConfigError, match=r"model\.options\.image_options: max_pixels would be of no use"):
        create(GenericOptions(image_options={"max_pixels": 9}), context)


def test_what_is_refused_is_what_transformers_own_forward_says_otherwise(tmp_path):
    """The check compares with the model itself: images of this one do see later ones."""
    folder = checkpoint(tmp_path / "gemma3", "gemma3")
    processor = own_processor(folder)
    image = load_image(picture(20, 20))
    given = processor(text=["<start_of_image> a"], images=[[image]], return_tensors="np", return_mm_token_type_ids=True)
    alone = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    tensors = {name: torch.as_tensor(value) for name, value in given.items()}
    with torch.no_grad():
        both = own_logits(alone, [tensors])
        causal = own_logits(alone, [{name: value for name, value in tensors.items() if name != "token_type_ids"}])
    assert (both - causal).abs().max() > 1e-2


def test_turns_show_images_as_rows_do(subtests, tmp_path):
    for family in ("llava_next", "idefics3", "qwen2_vl"):
        with subtests.test(family=family):
            check_turns(checkpoint(tmp_path / family, family))


def same(found, expected):
    assert found.arrays.keys() == expected.arrays.keys()
    for name, array in expected.arrays.items():
        assert (found.arrays[name].shape, bytes(found.arrays[name].data)) == (array.shape, bytes(array.data)), name


def check_turns(folder):
    model = generic(folder)
    wide, small, tall = picture(72, 40, 1), picture(20, 20, 2), picture(16, 50, 3)
    said = [
        Message(role="user", content="Is  red?", media=(wide,), places=(3,)),
        Message(role="assistant", content="yes"),
        Message(role="user", content="and or ", media=(small, tall), places=(4, 7)),
    ]
    marked = [attrs.evolve(turn, media=(), places=()) for turn in said]
    marked[0] = attrs.evolve(marked[0], content="Is <image> red?")
    marked[2] = attrs.evolve(marked[2], content="and <image>or <image>")
    whole = model.encode(Prompt(text=tuple(marked), media=(wide, small, tall)))
    same(model.encode(Prompt(text=tuple(said))), whole)
    # A row's own media stand where they are marked, beside those of other turns.
    same(model.encode(Prompt(text=(marked[0], *said[1:]), media=(wide,))), whole)
    # In parts: what the model said is text, and nothing is encoded anew.
    first = Prompt(text=(said[0],))
    own = tokens_payload(model.tokenizer("yes", add_special_tokens=False)["input_ids"])
    after = model.encode_seen_turns(first, values(own, "prompt").tolist(), said[2:])
    same(model.join([model.encode(first), own, after]), whole)
    placeholder = tokens_payload([int(values(whole, "prompt")[values(whole, "kinds") != 0][0])])
    going = model.join([model.encode(first), placeholder, after])
    assert values(going, "kinds").tolist() == [
        *values(model.encode(first), "kinds").tolist(),
        0,
        *values(after, "kinds").tolist(),
    ]
    assert model.condition(going) is not None
    # Words spell neither the placeholder nor the character that stands for an image.
    token = model.processor.image_token
    spelt, plain = (
        model.encode_seen_turns(first, [], [Message(role="user", content=content, media=(small,))])
        for content in (f"a {token}<image>", "a b")
    )
    assert np.count_nonzero(values(spelt, "kinds")) == np.count_nonzero(values(plain, "kinds")) > 0
    for turn, refusal in [
        (Message(role="user", content="\U0010fffd"), "stands for images"),
        (Message(role="user", content="ab", media=(wide,), places=(3,)), "places \\[3\\]"),
        (Message(role="user", content="ab", media=(wide, wide), places=(1,)), "shows 2 images at the places"),
        (Message(role="user", content="ab", media=("none.png",)), "no such file"),
        (Message(role="user", content="ab", media=("http://there/is.png",)), "nothing is fetched"),
    ]:
        with pytest.raises(DataError, match=refusal):
            model.encode_seen_turns(first, [], [turn])
    # A model of text says so, and so does a template that leaves images out.
    with pytest.raises(DataError, match="the turns show 2 images, and this model is one of text"):
        model.encode_turns(first, [], said[2:])
    kept = "{{ m.content if m.role == 'assistant' else m.content[-2:] }}"
    curt = generic(folder, chat_template=f"{{% for m in messages %}}{kept}|{{% endfor %}}")
    with pytest.raises(DataError, match="the turns show 1 images, and the chat template writes 0 for them"):
        curt.encode_seen_turns(first, [], [Message(role="user", content="ab", media=(wide,))])
