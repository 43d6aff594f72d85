"""What every Hugging Face model must satisfy: packed log-probs are those of its own forward on each sequence alone."""

import numpy as np
import pytest
import torch

from cosmos_core.errors import PluginIncompatibleError
from cosmos_core.policy.modeling import HuggingFaceModel, HuggingFaceOptions, tokens_payload, values
from cosmos_core.protocols import ModelContext

torch.set_num_threads(1)

CPU = torch.device("cpu")
BASE = {
    "vocab_size": 80,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
}
FAMILIES = {
    "qwen3": {"model_type": "qwen3", "head_dim": 8},
    "qwen3-windows": {
        "model_type": "qwen3",
        "head_dim": 8,
        "use_sliding_window": True,
        "sliding_window": 6,
        "layer_types": ["full_attention", "sliding_attention"],
    },
    "qwen2": {"model_type": "qwen2"},
    "llama": {"model_type": "llama"},
    "mistral-window": {"model_type": "mistral", "sliding_window": 5},
    "granite-scaled-logits": {"model_type": "granite", "logits_scaling": 3.0, "residual_multiplier": 0.5},
    "cohere-scaled-logits": {"model_type": "cohere", "logit_scale": 0.25},
    "qwen3-moe": {
        "model_type": "qwen3_moe",
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
    },
    "phi3": {"model_type": "phi3", "pad_token_id": 0},
}


def build(config, tmp_path, dtype=torch.float32):
    model = HuggingFaceModel(
        HuggingFaceOptions(), ModelContext(path=None, config={**BASE, **config}, assets=tmp_path / "assets")
    )
    return model, model.build(seed=0, dtype=dtype, device=CPU)


def sequences(seed=0):
    generator = np.random.default_rng(seed)
    sizes = [(3, 9), (12, 1), (1, 1), (7, 14), (5, 6), (3, 9)]
    return [tokens_payload(generator.integers(3, 80, p), generator.integers(3, 80, c)) for p, c in sizes]


def alone(module, payload, temperature):
    """transformers' own forward with its own attention."""
    prompt, completion = (torch.from_numpy(values(payload, name).copy()).long() for name in ("prompt", "completion"))
    ids = torch.cat([prompt, completion])[None]
    module.set_attn_implementation("sdpa")
    logits = module(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    module.set_attn_implementation("cosmos_packed")
    return torch.log_softmax(logits / temperature, -1).gather(1, completion[:, None])[:, 0]


def packed(model, module, payloads, temperature, budget):
    result = [None] * len(payloads)
    for batch in model.pack(payloads, budget=budget):
        parts = model.decide(module, batch, temperature=temperature).logprobs_N.split(list(batch.num_decisions))
        for index, part in zip(batch.sequences, parts, strict=True):
            result[index] = part
    return result


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_equal_those_of_each_sequence_alone(family, tied, tmp_path):
    model, module = build({**FAMILIES[family], "tie_word_embeddings": tied}, tmp_path)
    payloads = sequences()
    with torch.no_grad():
        for temperature, budget in ((1.0, 200), (0.7, 25)):
            for payload, mine in zip(payloads, packed(model, module, payloads, temperature, budget), strict=True):
                torch.testing.assert_close(mine, alone(module, payload, temperature), atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
def test_gradients_equal_those_of_each_sequence_alone(family, tmp_path):
    model, module = build(FAMILIES[family], tmp_path)
    payloads = sequences()
    parameters = list(module.parameters())
    mine = torch.autograd.grad(torch.cat(packed(model, module, payloads, 1.0, 200)).sum(), parameters)
    theirs = torch.autograd.grad(torch.cat([alone(module, p, 1.0) for p in payloads]).sum(), parameters)
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


def test_bf16_weights_are_close(tmp_path):
    model, module = build(FAMILIES["qwen3"], tmp_path, torch.bfloat16)
    payloads = sequences()
    with torch.no_grad():
        for payload, mine in zip(payloads, packed(model, module, payloads, 1.0, 200), strict=True):
            assert mine.dtype == torch.float32
            torch.testing.assert_close(mine, alone(module, payload, 1.0), atol=0.15, rtol=0)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_type": "qwen3_next"}, "linear_attention layers, which cannot be packed"),
        ({"model_type": "gemma2", "head_dim": 8}, "soft cap"),
        ({"model_type": "mamba2", "num_heads": 8, "head_dim": 8, "n_groups": 1, "state_size": 8}, "differ|cannot"),
    ],
    ids=["linear attention", "soft-capped attention", "recurrent"],
)
def test_a_model_that_cannot_be_packed_is_refused_when_it_is_built(config, reason, tmp_path):
    keys = {"mamba2": {"vocab_size", "hidden_size", "num_hidden_layers"}}.get(config["model_type"], set(BASE))
    model = HuggingFaceModel(
        HuggingFaceOptions(),
        ModelContext(
            path=None, config={**{k: v for k, v in BASE.items() if k in keys}, **config}, assets=tmp_path / "a"
        ),
    )
    with pytest.raises(PluginIncompatibleError, match=reason):
        model.build(seed=0, dtype=torch.float32, device=CPU)


def test_the_check_at_build_notices_a_head_of_its_own(tmp_path):
    class Wrong(HuggingFaceModel):
        def logits(self, module, hidden_ND):
            return super().logits(module, hidden_ND) * 1.01

    model = Wrong(
        HuggingFaceOptions(), ModelContext(path=None, config={**BASE, **FAMILIES["llama"]}, assets=tmp_path / "assets")
    )
    with pytest.raises(PluginIncompatibleError, match="packed logits differ"):
        model.build(seed=0, dtype=torch.float32, device=CPU)
