"""Prompts with images of any vision-language model that the generic plugin takes, against the trainer's evaluation."""

import torch

from cosmos_core.models import values
from cosmos_core.models.plugin import create
from cosmos_core.models.vision.generic import GenericOptions
from cosmos_core.protocols import ModelContext, Request, Sampling
from tests.vision import FAMILIES, checkpoint, prompts


def test_completions_have_the_log_probs_of_the_trainer(make, tmp_path):
    for family in FAMILIES:
        folder = checkpoint(tmp_path / family, family)
        model = create(GenericOptions(), ModelContext(path=str(folder), config=None, assets=tmp_path / "none"))
        shown = [model.encode(prompt) for prompt in prompts()]
        assert any(len(prompt.arrays) > 1 for prompt in shown)
        longest = max(prompt.arrays["prompt"].shape[0] for prompt in shown) + 8
        engine = make(model, max_in_flight=4, context_length=longest, prefill_units=7)
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
