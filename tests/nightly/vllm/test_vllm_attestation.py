"""What real vLLM holds and computes with is what was published, or nothing is served of it."""

from __future__ import annotations

import pytest
import torch

from cosmos_core.errors import AttestationError, EngineError
from cosmos_core.weights.digest import digest_of

from . import plants
from .conftest import make_model

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(400)]

QKV, GATE_UP = "model.layers.1.self_attn.qkv_proj", "model.layers.0.mlp.gate_up_proj"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_planted_corruption_of_a_fused_layout_is_named(start, pricer, dtype):
    engine = start(dtype=dtype)
    workers = engine.engine._backend._llm
    tensors = {name: tensor.to(dtype) for name, tensor in pricer.tensors(1).items()}
    (packs,) = workers.collective_rpc(plants.packs, args=(QKV,))
    faults = [
        (
            (plants.spoil_a_slice, "model.layers.1.self_attn.k_proj.weight"),
            "layers.1.self_attn.k_proj.weight: .*rank 0",
        ),
        ((plants.spoil_a_slice, "model.layers.0.mlp.up_proj.weight"), "layers.0.mlp.up_proj.weight: .*rank 0"),
        # Rows of q_proj, k_proj (64 rows from 128 on) and v_proj; of gate_proj and up_proj (from 48 on).
        ((plants.spoil_a_product, QKV, 130), "layers.1.self_attn.k_proj.weight: products of .*qkv_proj"),
        ((plants.spoil_a_product, GATE_UP, 95), "layers.0.mlp.up_proj.weight: products of .*gate_up_proj"),
    ]
    for plant, named in faults if packs else faults[:2]:
        fault, *arguments = plant
        workers.collective_rpc(fault, args=(0, *arguments))
        try:
            with pytest.raises(AttestationError, match=named):
                engine.load(1, pricer.tensors(1))
        finally:
            workers.collective_rpc(plants.mend)
        engine.abort_update()
        assert engine.load(1, pricer.tensors(1)) == digest_of(tensors)
    if not packs:
        pytest.skip(f"this processor computes {dtype} products with the matrices as they are: no copy can be wrong")


def test_a_model_whose_weights_vllm_brings_into_another_form_is_refused(start, tmp_path):
    # Experts are packed for the kernels of the CPU build, and what was loaded is dropped.
    experts = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    # On some processors vLLM drops the matrices that it makes others of, on some it keeps both.
    why = "(form of its own|no tensor of the model goes into)"
    with pytest.raises(EngineError, match=rf"{why}.*first are .*experts.*w13_weight.*use the engine 'embedded'"):
        start(model=make_model(tmp_path, **experts))
