"""Tiny models on a mesh, against one process: losses and gradients."""

from pathlib import Path
from typing import Any

import attrs
import torch
from torch.distributed.tensor import DTensor
from transformers import (
    ApertusConfig,
    AutoModelForCausalLM,
    DeepseekV3Config,
    LlamaConfig,
    OPTConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from cosmos_core.config.schema import MeshConfig
from cosmos_core.models import PACKED, HuggingFaceModel, HuggingFaceOptions, tokens_payload
from cosmos_core.models.parallel.parallelize import parallelize
from cosmos_core.models.parallel.plan import plan_for
from cosmos_core.policy.mesh.mesh import form_mesh
from cosmos_core.protocols import Layout, ModelContext

VOCABULARY = 64
TEMPERATURE = 0.7
ROWS, UNITS, MICRO_BATCHES = 4, 16, 2


class Packed(HuggingFaceModel):
    """Its config is that of the module which it is given."""

    alone_because = ""


MODEL = Packed(HuggingFaceOptions(), ModelContext(path=None, config=None, assets=Path("nowhere")))

BASE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "pad_token_id": 3,
}
MOE: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
MLA: dict[str, Any] = {
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}


def config_of(kind: str, **changes: Any):
    base = {**BASE, **changes}
    if kind == "llama":
        return LlamaConfig(**base)
    if kind == "apertus":  # its activation learns
        return ApertusConfig(**base, rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
    if kind == "qwen3":
        return Qwen3Config(head_dim=8, **base)
    if kind == "qwen3_moe":
        return Qwen3MoeConfig(**{"head_dim": 8, "num_experts": 8, "norm_topk_prob": True, **MOE, **base})
    if kind == "deepseek_v3":
        routing = {"n_routed_experts": 8, "n_shared_experts": 1, "n_group": 1, "topk_group": 1}
        return DeepseekV3Config(first_k_dense_replace=1, **routing, **MOE, **{**base, **MLA, **changes})
    assert kind == "opt"
    names = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
    return OPTConfig(
        **{name: base[name] for name in names},
        tie_word_embeddings=base["tie_word_embeddings"],
        ffn_dim=48,
        word_embed_proj_dim=32,
        init_std=0.2,
    )


def build(kind: str, **changes: Any):
    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_config(config_of(kind, **changes), attn_implementation=PACKED)
    with torch.no_grad():
        for parameter in module.parameters():
            # Norms of ones and biases of zeros would hide which part of them a process has.
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return module.eval()


def tokens() -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (ROWS, UNITS), generator=torch.Generator().manual_seed(1))


def loss_of(module, tokens_BU: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The share of these rows in the mean of minus the log-probability over all rows, and their sum of entropies."""
    (batch,) = MODEL.pack(
        [tokens_payload(row[:1], row[1:]) for row in tokens_BU.tolist()], budget=ROWS * UNITS, multiple=UNITS
    )
    decided = MODEL.decide(module, batch, temperature=TEMPERATURE, with_entropy=True)
    assert not decided.entropy_N.requires_grad
    return -decided.logprobs_N.float().sum() / (ROWS * (UNITS - 1)), decided.entropy_N.float().sum()


def train(module, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    losses, entropies = [], []
    for tokens_BU in rows.chunk(MICRO_BATCHES if len(rows) > 1 else 1):
        loss, entropy = loss_of(module, tokens_BU)
        loss.backward()
        losses.append(loss.detach())
        entropies.append(entropy)
    return sum(losses), sum(entropies)


def gradients(module) -> dict[str, torch.Tensor]:
    return {
        name: (p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad).detach().clone()
        for name, p in module.named_parameters()
        if p.grad is not None
    }


def reference(kind: str, **changes: Any):
    module = build(kind, **changes)
    loss, entropy = train(module, tokens())
    return loss.item(), entropy.item(), gradients(module)


def member(  # noqa: PLR0917 - what a process is given
    kind: str,
    sizes: dict[str, int],
    options: dict[str, Any],
    changes: dict[str, Any],
    expected,
    overrides: dict[str, str] | None = None,
):
    """One process: the largest relative errors of loss, entropy and gradients against one process."""
    mesh = form_mesh(MeshConfig(**sizes), "cpu")
    module = build(kind, **changes)
    names = [name for name, _ in module.named_parameters()]
    parallelize(module, Layout(mesh=mesh, **options), plan_for(module, overrides or {}))
    assert [name for name, _ in module.named_parameters()] == names
    place = mesh.place("dp_replicate") * mesh.size("dp_shard") + mesh.place("dp_shard")
    per = ROWS // (mesh.size("dp_replicate") * mesh.size("dp_shard"))
    loss, entropy = train(module, tokens()[place * per : place * per + per])
    totals = torch.stack((loss, entropy))
    torch.distributed.all_reduce(totals)
    totals /= mesh.size("tp")
    whole = gradients(module)
    if mesh.size("dp_replicate") > 1:
        for gradient in whole.values():
            torch.distributed.all_reduce(gradient, group=mesh.group("dp_replicate"))
    local = {name: tuple(p.to_local().shape) for name, p in module.named_parameters()}
    assert whole.keys() == expected[2].keys()
    total = torch.stack([value.double().norm() for value in expected[2].values()]).norm().item()
    errors = {name: relative(whole[name], expected[2][name], total) for name in whole}
    worst = max(errors, key=errors.__getitem__)
    return Outcome(
        loss=abs(totals[0].item() / expected[0] - 1),
        entropy=abs(totals[1].item() / expected[1] - 1),
        worst=worst,
        error=errors[worst],
        local=local,
    )


def relative(value: torch.Tensor, expected: torch.Tensor, total: float) -> float:
    """Error over norm; a gradient that is zero but for rounding (a key's bias) counts against all of them."""
    difference = (value.double() - expected.double()).norm()
    return (difference / expected.double().norm().clamp_min(1e-2 * total)).item()


@attrs.frozen(kw_only=True)
class Outcome:
    loss: float
    entropy: float
    worst: str
    error: float
    local: dict[str, tuple[int, ...]]
