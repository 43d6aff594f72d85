"""Products with packed matrices, against plain ones, and over updates."""

from __future__ import annotations

import pytest
import torch
from transformers import Qwen3Config

from cosmos_core.errors import AttestationError
from cosmos_core.rollout.embedded import packed
from cosmos_core.rollout.embedded.packed import PackedMatrices

needs_kernels = pytest.mark.skipif(
    not packed._has_kernels(), reason="this CPU has no kernels for packed bfloat16 matrices"
)


class Twice(torch.nn.Linear):
    def forward(self, inputs):
        return 2 * super().forward(inputs)


def module(dtype=torch.bfloat16):
    torch.manual_seed(0)
    layers = [torch.nn.Linear(48, 80), torch.nn.Linear(80, 33, bias=False), Twice(33, 9)]
    return torch.nn.Sequential(*layers).to(dtype).requires_grad_(False)


@needs_kernels
def test_products_are_the_same_to_the_last_bit():
    for rows in [1, 7, 64, 500]:
        plain, changed = module(), module()
        assert PackedMatrices.of(changed) is not None
        inputs = torch.randn(1, rows, 48).bfloat16()
        assert "forward" in vars(changed[0])
        assert "forward" not in vars(changed[2])
        assert torch.equal(changed(inputs), plain(inputs))
        # Of inputs that do not lie in order, but for when a bias is rounded.
        strided = torch.randn(1, 48, rows).bfloat16().transpose(1, 2)
        torch.testing.assert_close(changed(strided), plain(strided), atol=0.03, rtol=0.02)


@needs_kernels
def test_what_is_written_counts_from_the_next_packing_on():
    plain, changed = module(), module()
    matrices = PackedMatrices.of(changed)
    inputs = torch.randn(3, 48).bfloat16()
    for each in (plain, changed):
        each[0].weight.mul_(3)
        each[0].bias.add_(1)
    with pytest.raises(AttestationError, match=r"0\.weight: the packed copy .* is not what is loaded"):
        matrices.check()
    assert not torch.equal(changed(inputs), plain(inputs))
    matrices.pack()
    matrices.check()
    assert torch.equal(changed(inputs), plain(inputs))


def test_other_dtypes_are_left_alone():
    for dtype in (torch.float32, torch.float16):
        changed = module(dtype)
        assert PackedMatrices.of(changed) is None
        assert all("forward" not in vars(layer) for layer in changed)


def test_without_kernels_nothing_is_packed(monkeypatch):
    monkeypatch.setattr(packed, "_has_kernels", lambda: False)
    changed = module()
    assert PackedMatrices.of(changed) is None
    assert all("forward" not in vars(layer) for layer in changed)


@needs_kernels
def test_a_bfloat16_engine_generates_with_what_was_loaded_last(kit, make):
    for tied in [True, False]:
        model = kit.FakeModel(Qwen3Config(**kit.SHAPE, tie_word_embeddings=tied), stop_ids=frozenset())
        engine = make(model, dtype=torch.bfloat16)
        prompts = kit.ragged(3)
        for version in (1, 2):
            weights = model.build(seed=10 + version, dtype=torch.bfloat16, device=torch.device("cpu"))
            kit.load(engine, weights, version=version)
            for index, prompt in enumerate(prompts):
                (generated,) = engine.submit([kit.request(f"{version}-{index}", prompt)])[0].result(20)
                expected = kit.plain_logprobs(weights, prompt, kit.completion(generated))
                assert abs(kit.logprobs(generated) - expected).mean() < 0.05


@needs_kernels
def test_the_option_decides(kit, make):
    for packs in [True, False]:
        engine = make(kit.FakeModel(), dtype=torch.bfloat16, pack_matrices=packs)
        assert (engine._packed is not None) == packs


@needs_kernels
def test_a_packed_matrix_that_is_not_what_was_written_fails_the_update(kit, make, monkeypatch):
    engine = make(kit.FakeModel(), dtype=torch.bfloat16)
    monkeypatch.setattr(PackedMatrices, "pack", lambda self: None)
    with pytest.raises(AttestationError, match="is not what is loaded"):
        kit.load(engine, kit.FakeModel().build(seed=5, dtype=torch.bfloat16, device="cpu"), version=1)
