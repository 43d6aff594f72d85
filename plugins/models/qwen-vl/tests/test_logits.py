"""Packed rows against transformers' own forward of each sequence alone, with real images and videos."""

import pytest
import torch
from transformers import AutoModelForImageTextToText

from cosmos_core.models import values
from cosmos_core.protocols import ModelContext
from cosmos_core.types import Message, Prompt
from cosmos_model_qwen_vl import QwenVLModel, QwenVLOptions
from cosmos_model_qwen_vl.alone import own_logits
from cosmos_model_qwen_vl.tiny import data_url, film, picture

CPU = torch.device("cpu")


@pytest.fixture
def payloads(model, tmp_path):
    images = [data_url(picture(width, height, seed)) for seed, (width, height) in enumerate(((40, 24), (16, 16)))]
    long, short = film(tmp_path / "long", 5, 24, 16), film(tmp_path / "short", 2, 8, 8)
    chat = (Message(role="system", content="See."), Message(role="user", content="What happens?"))
    prompts = [
        Prompt(text="How many?", demonstration="twelve, or 13"),
        Prompt(text="Which colour?", demonstration="red", media=(images[0],)),
        Prompt(text="<image> is not <image>, is it", demonstration="blue", media=tuple(images)),
        Prompt(text=chat, demonstration="It ends.", media=(long,)),
        Prompt(text="<video>, <image>, <video>: then?", demonstration="none", media=(short, images[1], long)),
        Prompt(text="And words alone?", demonstration="yes"),
    ]
    return [model.encode_demonstration(prompt) for prompt in prompts]


@pytest.fixture
def alone(model, module, tmp_path):
    """What transformers reads back from an export, attending in its own way."""
    model.export(module, tmp_path / "export")
    return AutoModelForImageTextToText.from_pretrained(tmp_path / "export", dtype=torch.float32).eval()


def own_logprobs(model, alone, payload):
    completion = torch.tensor(values(payload, "completion").tolist())
    logits_NV = own_logits(alone, model, payload)[len(values(payload, "prompt")) - 1 : -1]
    return logits_NV.log_softmax(-1).gather(1, completion[:, None])[:, 0]


def test_log_probs_are_those_of_each_sequence_alone(model, module, payloads, alone, subtests):
    for settings in [{"budget": 1000}, {"budget": 200}, {"budget": 1000, "multiple": 16}]:
        with subtests.test(settings=settings):
            batches = model.pack(payloads, **settings)
            assert sorted(index for batch in batches for index in batch.sequences) == list(range(len(payloads)))
            for batch in batches:
                expected = torch.cat([own_logprobs(model, alone, payloads[index]) for index in batch.sequences])
                found = model.decide(module, batch, temperature=1.0).logprobs_N
                torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def test_logits_are_those_of_each_sequence_alone(model, module, payloads, alone):
    for payload in payloads:
        (batch,) = model.pack([payload], budget=1000)
        with torch.no_grad():
            found = model.logits(module, model.hidden(module, model._row(module, batch)))
            expected = own_logits(alone, model, payload)[: len(found)]
        assert (found - expected).abs().max() <= 1e-5 * expected.abs().max().clamp_min(1.0)


def test_gradients_are_those_of_each_sequence_alone_and_reach_the_tower(model, module, payloads, alone):
    for batch in model.pack(payloads, budget=1000):
        model.decide(module, batch, temperature=1.0).logprobs_N.sum().backward()
    for payload in payloads:
        own_logprobs(model, alone, payload).sum().backward()
    own = {name: parameter.grad for name, parameter in alone.named_parameters()}
    for name, parameter in module.named_parameters():
        assert parameter.grad.abs().max() > 0, name
        scale = own[name].abs().max().item()
        torch.testing.assert_close(parameter.grad, own[name], atol=1e-5 * max(scale, 1.0), rtol=1e-4, msg=name)


def test_what_is_seen_matters_and_stays_in_its_own_document(model, module, payloads):
    def evaluate(first, second):
        (batch,) = model.pack([first, second], budget=1000)
        logprobs = torch.split(model.decide(module, batch, temperature=1.0).logprobs_N, batch.num_decisions)
        return [logprobs[batch.sequences.index(index)] for index in range(2)]

    other = model.encode_demonstration(
        Prompt(text="Which colour?", demonstration="red", media=(data_url(picture(40, 24, 9)),))
    )
    seen, neighbour = evaluate(payloads[1], payloads[2])
    seen_otherwise, same_neighbour = evaluate(other, payloads[2])
    assert (seen - seen_otherwise).abs().max() > 1e-3
    torch.testing.assert_close(neighbour, same_neighbour, atol=1e-5, rtol=0)


def test_a_sampled_placeholder_is_a_token_as_any_other(model, module, payloads, alone):
    """A policy may write `<|image_pad|>`; it must not take the place of what another sequence sees."""
    written = model.encode_demonstration(Prompt(text="Say it", demonstration="a <|image_pad|> b"))
    (batch,) = model.pack([written, payloads[1]], budget=1000)
    expected = torch.cat([own_logprobs(model, alone, [written, payloads[1]][index]) for index in batch.sequences])
    torch.testing.assert_close(model.decide(module, batch, temperature=1.0).logprobs_N, expected, atol=1e-5, rtol=0)


def test_an_export_is_a_checkpoint_that_encodes_the_same(model, module, tmp_path):
    model.export(module, tmp_path / "export")
    context = ModelContext(path=str(tmp_path / "export"), config=None, assets=tmp_path / "none")
    again = QwenVLModel(QwenVLOptions(), context)
    row = Prompt(text="Which?", media=(data_url(picture(50, 50)), film(tmp_path / "film", 4, 40, 40)))
    marked = Prompt(text=f"<image><video>{row.text}", media=row.media)
    for prompt in (row, marked):
        assert {name: array.data for name, array in again.encode(prompt).arrays.items()} == {
            name: array.data for name, array in model.encode(prompt).arrays.items()
        }
