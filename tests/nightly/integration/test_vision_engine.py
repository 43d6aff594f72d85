"""What the embedded engine generates from images with the generic model, against transformers' own generation."""

from inspect import signature

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText

from cosmos_core.models import values
from cosmos_core.models.plugin import create
from cosmos_core.models.vision.generic import GenericOptions
from cosmos_core.plugins.selection import PluginSet
from cosmos_core.protocols import EngineContext, ModelContext, Request, Sampling
from tests.vision import checkpoint, own_inputs, own_processor, prompts

CPU = torch.device("cpu")


@pytest.fixture(params=["llava_next", "idefics3", "qwen3_vl"])
def folder(request, tmp_path):
    torch.set_num_threads(1)
    return checkpoint(tmp_path / request.param, request.param)


def test_greedy_completions_are_those_of_transformers_and_of_the_trainer(folder):
    model = create(GenericOptions(), ModelContext(path=str(folder), config=None, assets=folder / "none"))
    alone = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    context = EngineContext(model=model, dtype=torch.float32, device=CPU, max_in_flight=4, context_length=512, seed=0)
    engine = PluginSet.load([("engine", "embedded")]).create("engine", "embedded", {}, context)
    engine.start()
    try:
        greedy = Sampling(temperature=0.0, max_units=8)
        requests = [
            Request(request_id=str(index), prompt=model.encode(prompt), sampling=greedy, seed=index)
            for index, prompt in enumerate(prompts())
        ]
        made = [handle.result(60)[0].payload for handle in engine.submit(requests)]
    finally:
        engine.shutdown()
    processor = own_processor(folder)
    module = model.build(seed=0, dtype=torch.float32, device=CPU)
    for prompt, payload in zip(prompts(), made, strict=True):
        given, _ = own_inputs(processor, prompt, with_end=False)
        known = {name: value for name, value in given.items() if name in signature(alone.forward).parameters}
        expected = alone.generate(
            **known, do_sample=False, max_new_tokens=8, eos_token_id=sorted(model.facts().stop_ids), pad_token_id=0
        )[0, given["input_ids"].shape[1] :]
        assert values(payload, "completion").tolist() == expected.tolist()
        (batch,) = model.pack([payload], budget=600)
        trained = model.decide(module, batch, temperature=1.0).logprobs_N.detach().numpy()
        np.testing.assert_allclose(values(payload, "logprobs"), trained, atol=1e-5, rtol=0)
