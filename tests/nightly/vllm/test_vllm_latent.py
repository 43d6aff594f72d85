"""Latent attention (DeepSeek-V3) on real vLLM: updates reach what vLLM makes of the up-projection."""

from __future__ import annotations

import pytest
import torch

from cosmos_core.errors import AttestationError
from cosmos_core.testing import EngineConformance
from cosmos_core.testing.conformance.engine.subject import Pricer, stopping_at
from cosmos_core.weights.digest import digest_of
from cosmos_engine_vllm import latent

from .conftest import make_model
from .test_vllm_conformance import OF_SLICES

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(400)]

LATENT = {
    "model_type": "deepseek_v3",
    "num_key_value_heads": 4,
    "num_attention_heads": 4,
    "head_dim": 64,
    "tie_word_embeddings": False,
    "q_lora_rank": 24,
    # The only size of a cached unit that vLLM's kernel for CPUs has: 512 + 64.
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 64,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    # On a CPU vLLM packs experts, and drops them.
    "first_k_dense_replace": 99,
}


@pytest.fixture(scope="module")
def latent_model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("latent"), **LATENT)


class TestLatent(EngineConformance):
    """Where weights go and what is computed with them; the rest does not depend on how a model attends."""

    plugin = "vllm"
    timeout_s = 60.0
    start_timeout_s = 300.0

    @pytest.fixture(scope="class")
    @classmethod
    def model(cls, latent_model):
        return latent_model


class TestLatentOnTwoRanks(TestLatent):
    tensor_parallel = 2


LOADED = "test_an_update_is_loaded_and_attested"
for name in dir(TestLatent):
    if name.startswith("test_") and name != LOADED:
        setattr(TestLatentOnTwoRanks, name, None)
        if name not in OF_SLICES:
            setattr(TestLatent, name, None)


def test_parts_that_were_not_made_anew_are_told(start, latent_model, monkeypatch):
    engine, pricer = start(model=stopping_at(latent_model, frozenset())), Pricer(latent_model, seed=1)
    (model,) = engine.engine._backend._llm.collective_rpc("get_model")
    assert len(latent.made_again(model)) == 2 * 2
    for name in latent.made_again(model):
        # Where they are of another dtype they are no views of the projection.
        layer, _, part = name.rpartition(".")
        copied = model.get_parameter(name).detach().clone()
        setattr(model.get_submodule(layer), part, torch.nn.Parameter(copied, requires_grad=False))
    assert engine.load(1, pricer.tensors(1)) == digest_of(pricer.tensors(1))
    monkeypatch.setattr(latent, "make_again", lambda _: None)
    with pytest.raises(AttestationError, match=r"layers\.0\.self_attn\.kv_b_proj\.weight: .* was not made anew"):
        engine.load(2, pricer.tensors(2))
