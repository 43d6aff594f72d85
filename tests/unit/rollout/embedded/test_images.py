"""Prompts with images of any vision-language model that the generic plugin takes, against the trainer's evaluation."""

import attrs
import torch

from cosmos_core.models import values
from cosmos_core.models.plugin import create
from cosmos_core.models.vision.generic import GenericOptions
from cosmos_core.protocols import FinishReason, ModelContext, Request, Sampling
from cosmos_core.rollout.episodes.dialogue import Dialogue
from cosmos_core.rollout.episodes.recording import encode_turns
from cosmos_core.types import Message, Prompt
from tests.vision import FAMILIES, checkpoint, picture, prompts


def test_completions_have_the_log_probs_of_the_trainer(make, tmp_path):
    for family in FAMILIES:
        folder = checkpoint(tmp_path / family, family)
        model = create(GenericOptions(), ModelContext(path=str(folder), config=None, assets=tmp_path / "none"))
        # The last two have the same ids, and are no beginnings of each other.
        twins = [Prompt(text="Which one is it? <image>" * 2, media=(picture(72, 40, n),) * 2) for n in (5, 6)]
        shown = [model.encode(prompt) for prompt in (*prompts(), *twins)]
        assert values(shown[-1], "prompt").tolist() == values(shown[-2], "prompt").tolist()
        longest = max(prompt.arrays["prompt"].shape[0] for prompt in shown) + 8
        engine = make(model, max_in_flight=4, context_length=longest, prefill_units=7, dialogues=True)
        requests = [
            Request(request_id=str(index), prompt=prompt, sampling=Sampling(max_units=8, num_samples=2), seed=index)
            for index, prompt in enumerate(shown)
        ]
        payloads = [made.payload for handle in engine.submit(requests) for made in handle.result(60)]
        scores = engine.score(payloads, temperature=1.0)
        module = model.build(seed=1, dtype=torch.float32, device=torch.device("cpu"))
        for payload, score in zip(payloads, scores, strict=True):
            (batch,) = model.pack([payload], budget=longest)
            with torch.no_grad():
                expected = model.decide(module, batch, temperature=1.0).logprobs_N
            found = torch.from_numpy(values(payload, "logprobs").copy())
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
            torch.testing.assert_close(score, expected, atol=1e-5, rtol=0)


def talk(model, engine, row):
    """A dialogue in which others show an image, and then two, of which one stands within the words."""
    small, wide = picture(20, 20, 4), picture(72, 40, 5)
    others = [
        Message(role="user", content="See <image>", media=(small,)),
        Message(role="user", content="this or that?", media=(wide, small), places=(4, 8)),
    ]
    dialogue, written = Dialogue(opening=model.encode(row), model=model), []
    for number, said in enumerate([None, *others]):
        if said is not None:
            dialogue.add_observation(encode_turns(model, row, written, [said], sees=True), said)
        request = Request(request_id=str(number), prompt=dialogue.so_far(), sampling=Sampling(max_units=6), seed=number)
        (made,) = engine.submit([request])[0].result(60)
        written = dialogue.add_turn(made, "", request.prompt)
    return dialogue.recording.generated(dialogue.opening, FinishReason.STOP, 0, model, 0.0).payload


def test_dialogues_show_images_in_any_turn(make, tmp_path):
    for family in ("idefics3", "qwen3_vl"):
        folder = checkpoint(tmp_path / family, family)
        model = create(GenericOptions(), ModelContext(path=str(folder), config=None, assets=tmp_path / "none"))
        module = model.build(seed=1, dtype=torch.float32, device=torch.device("cpu"))
        engine = make(model, max_in_flight=4, context_length=400, prefill_units=7)
        chat = (Message(role="user", content="Is it red?"),)
        rows = [Prompt(text=chat), attrs.evolve(prompts()[3], text=prompts()[3].text[1:]), Prompt(text="Red?")]
        payloads = [talk(model, engine, row) for row in rows]
        batches = model.pack(payloads, budget=1000)
        scores = engine.score(payloads, temperature=1.0)
        with torch.no_grad():
            decided = [model.decide(module, batch, temperature=1.0).logprobs_N for batch in batches]
        parts = {
            index: part
            for batch, all_N in zip(batches, decided, strict=True)
            for index, part in zip(batch.sequences, torch.split(all_N, batch.num_decisions), strict=True)
        }
        for index, (payload, score) in enumerate(zip(payloads, scores, strict=True)):
            found = torch.from_numpy(values(payload, "logprobs").copy())
            torch.testing.assert_close(found, parts[index], atol=1e-5, rtol=0)
            torch.testing.assert_close(score, parts[index], atol=1e-5, rtol=0)
