"""Each way of attending over slices against one process that has the row."""

import functools
from pathlib import Path

import attrs
import pytest
import torch
import torch.distributed as dist

from cosmos_core.config.schema import MeshConfig
from cosmos_core.errors import ConfigError
from cosmos_core.models import HuggingFaceModel, HuggingFaceOptions, tokens_payload
from cosmos_core.models.attention.context import install
from cosmos_core.models.parallel.forwards import recompute_layer, root
from cosmos_core.policy.mesh.mesh import form_mesh
from cosmos_core.protocols import Layout, ModelContext
from cosmos_core.testing.worlds import run_world

CPU = torch.device("cpu")
PAIRS = [(9, 30), (3, 10), (6, 5), (1, 1), (2, 9), (20, 11), (1, 5)]
"""Units of prompt and completion: the first document is cut by several slices."""
BASE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
}
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 7}
MLA = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": None,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "head_dim": 8,
    "first_k_dense_replace": 2,
}
CONFIGS = {
    "qwen3": {**BASE, "model_type": "qwen3"},
    "three heads": {**BASE, "model_type": "qwen3", "num_attention_heads": 3, "num_key_value_heads": 3},
    "windows": {**BASE, "model_type": "gemma3_text", **WINDOWS},
    "soft cap": {**BASE, "model_type": "gemma2", **WINDOWS, "attn_logit_softcapping": 2.0},
    "sinks": {**BASE, "model_type": "gpt_oss", **WINDOWS, "num_local_experts": 4, "num_experts_per_tok": 2},
    "mla": {**BASE, "model_type": "deepseek_v3", **MLA},
}


@attrs.frozen(kw_only=True)
class Case:
    model: str
    method: str
    recompute: str = "none"

    def __str__(self):
        return f"{self.model}, {self.method}{'' if self.recompute == 'none' else f', {self.recompute}'}"


PLAIN = [
    *(Case(model="qwen3", method=method) for method in ("ulysses", "gather", "ring", "auto")),
    Case(model="three heads", method="auto"),
    Case(model="three heads", method="ring"),
    *(Case(model=model, method=m) for model in ("soft cap", "sinks") for m in ("ulysses", "gather", "ring")),
    Case(model="mla", method="ring"),
]
CASES = {
    2: [
        *PLAIN,
        *(Case(model="qwen3", method=m, recompute=r) for m in ("ulysses", "ring") for r in ("full", "selective")),
        Case(model="qwen3", method="gather", recompute="full"),
        *(Case(model="windows", method=method) for method in ("ulysses", "gather", "ring")),
        *(Case(model=model, method="ring", recompute="selective") for model in ("soft cap", "sinks")),
        *(Case(model="mla", method=method) for method in ("ulysses", "gather")),
    ],
    4: PLAIN,
}


def evaluate(case, size):
    """Log-probs and entropies of two micro-batches, and gradients of a weighted sum of them."""
    model = HuggingFaceModel(
        HuggingFaceOptions(), ModelContext(path=None, config=CONFIGS[case.model], assets=Path("nowhere"))
    )
    module = model.build(seed=0, dtype=torch.float32, device=CPU)
    if size > 1:
        layout = Layout(mesh=form_mesh(MeshConfig(cp=size), "cpu"), context=case.method)
        install(module, layout)
        root(module, layout)
    for layer in module.get_decoder().layers:
        recompute_layer(layer, case.recompute)
    generator = torch.Generator().manual_seed(0)
    draw = functools.partial(torch.randint, 0, 64, generator=generator)
    payloads = [tokens_payload(draw((p,)).tolist(), draw((c,)).tolist()) for p, c in PAIRS]
    batches = model.pack(payloads, budget=70, multiple=size)
    assert len(batches) == 2
    decided = [model.decide(module, batch, temperature=1.3, with_entropy=True) for batch in batches]
    logprobs_N = torch.cat([each.logprobs_N for each in decided])
    torch.dot(logprobs_N, torch.randn(len(logprobs_N), generator=torch.Generator().manual_seed(1))).backward()
    gradients = {name: parameter.grad for name, parameter in module.named_parameters() if parameter.grad is not None}
    if size > 1:
        for gradient in gradients.values():
            dist.all_reduce(gradient)
    return logprobs_N.detach(), torch.cat([each.entropy_N for each in decided]), gradients


def evaluate_all(size):
    results = {str(case): evaluate(case, size) for case in CASES[size]}
    return results if dist.get_rank() in {0, size - 1} else None


@functools.cache
def on_several(size):
    return run_world(size, evaluate_all, size, timeout_s=240.0)


@functools.cache
def on_one(model):
    return evaluate(Case(model=model, method="auto"), 1)


def test_slices_of_a_row_give_what_the_row_gives(subtests):
    for case in CASES[2]:
        with subtests.test(case=case):
            check_slices(2, case)


def check_slices(size, case):
    logprobs_N, entropy_N, gradients = on_one(case.model)
    for rank in (0, size - 1):
        ours = on_several(size)[rank][str(case)]
        torch.testing.assert_close(ours[0], logprobs_N, atol=2e-6, rtol=1e-6)
        torch.testing.assert_close(ours[1], entropy_N, atol=2e-6, rtol=1e-6)
        assert ours[2].keys() == gradients.keys()
        for name, gradient in gradients.items():
            error = (ours[2][name] - gradient).norm() / gradient.norm().clamp(min=1e-3)
            assert error < 1e-5, f"{name}: {error}"


class Sizes:
    """Of a mesh; checks ask for nothing else."""

    def __init__(self, **sizes):
        self.sizes = sizes

    def size(self, axis):
        return self.sizes.get(axis, 1)


def test_what_a_method_does_not_compute_is_refused_before_work_starts(subtests):
    for model, method, sizes, message in [
        ("three heads", "ulysses", {"cp": 2}, "2 does not divide the 3 attention heads"),
        ("qwen3", "ulysses", {"cp": 4, "tp": 2}, "4 does not divide the 2 attention heads"),
    ]:
        with subtests.test(model=model, method=method, sizes=sizes, message=message):
            plugin = HuggingFaceModel(
                HuggingFaceOptions(), ModelContext(path=None, config=CONFIGS[model], assets=Path("nowhere"))
            )
            module = torch.nn.Module()
            module.config = plugin.config
            with pytest.raises(ConfigError, match=message):
                install(module, Layout(mesh=Sizes(**sizes), context=method))
            install(module, Layout(mesh=Sizes(**sizes), context="auto"))
            install(module, Layout(mesh=Sizes(), context=method))
