"""Compiled forwards with kernels of the machine, and beside other modules."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch
from transformers import Qwen3Config

from tests.unit.rollout.embedded.test_compiled import forgetful, needs_kernels, traced

__all__ = ["forgetful", "traced"]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(shutil.which("g++") is None, reason="kernels are compiled with g++, which this machine lacks")
def test_with_kernels_of_the_machine_it_generates_what_the_module_does(kit, make, monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    model = kit.FakeModel(stop_ids=frozenset())
    engine, module = make(model, compile=True, max_in_flight=4), kit.reference()
    prompts = kit.ragged(3)
    handles = engine.submit([kit.request(f"{i}", p, seed=i, max_units=6) for i, p in enumerate(prompts)])
    for prompt, handle in zip(prompts, handles, strict=True):
        (generated,) = handle.result(120)
        own = kit.plain_logprobs(module, prompt, kit.completion(generated))
        np.testing.assert_allclose(kit.logprobs(generated), own, atol=2e-5, rtol=0)


@needs_kernels
def test_packed_matrices_are_those_of_its_own_module_and_version(kit, make, traced):
    shapes = ({**kit.SHAPE, "num_hidden_layers": 1, "hidden_size": size} for size in (32, 64))
    models = [kit.FakeModel(Qwen3Config(**shape, tie_word_embeddings=True)) for shape in shapes]
    engines = [make(model, dtype=torch.bfloat16, compile=True, verify=False) for model in models]
    (prompt,) = kit.ragged(1, low=9, high=10)
    for version in (1, 2):
        for seed, (model, engine) in enumerate(zip(models, engines, strict=True)):
            weights = model.build(seed=10 * version + seed, dtype=torch.bfloat16, device=torch.device("cpu"))
            kit.load(engine, weights, version=version)
            (handle,) = engine.submit([kit.request(f"{version}", prompt, num_samples=2)])
            for generated in handle.result(60):
                own = kit.plain_logprobs(weights, prompt, kit.completion(generated))
                assert abs(kit.logprobs(generated) - own).mean() < 0.05
