"""What planning is told of what `tp` splits, and of what it must divide."""

import attrs
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, DeepseekV3Config, GptOssConfig, Qwen2Config, Qwen2MoeConfig, Qwen3Config

from cosmos_core.models import HuggingFaceModel, HuggingFaceOptions
from cosmos_core.models.activations import kept_by
from cosmos_core.models.facts import (
    attention_width,
    compressed_values,
    extents_of,
    head_size,
    matrices_of,
    matrix_parameters,
)
from cosmos_core.models.parallel.plan import plan_for
from cosmos_core.models.weights.loading import make_shell
from cosmos_core.protocols import ModelContext, ModelFacts
from tests.unit.models.parallel import layouts

torch.set_num_threads(1)

WHOLE = {f"self_attn.{name}_proj": "replicate" for name in "qkvo"}


def layer_of(tmp_path, overrides=None, config=None):
    config = (config or layouts.config_of("llama", num_attention_heads=4, num_key_value_heads=2)).to_dict()
    model = HuggingFaceModel(HuggingFaceOptions(), ModelContext(path=None, config=config, assets=tmp_path))
    model.prepare(["some 1 text"], {"build": "byte-bpe", "vocab_size": 300, "split_digits": True})
    model.tensor_plan = overrides or {}
    layer, *_ = (part for part in model.facts().parts if part.is_layer)
    return layer


def test_key_value_heads_are_told_apart(tmp_path):
    layer = layer_of(tmp_path)
    assert layer.head_parameters == {2: 2 * 16 * 32}
    # A key and a value of each unit at least, and no more than what attention keeps of queries besides.
    assert 4 * 2 * 16 <= layer.kept["float32"].heads < layer.kept["float32"].inner


def test_of_a_block_that_is_whole_all_that_it_keeps_is(tmp_path):
    split, whole = (layer_of(tmp_path, overrides) for overrides in ({}, WHOLE))
    before, after = split.kept["float32"], whole.kept["float32"]
    assert whole.head_parameters == {}
    assert whole.num_whole_parameters - split.num_whole_parameters == (2 * 32 + 2 * 16) * 32
    assert after.heads == 0
    assert after.inputs > before.inputs
    assert after.whole_products > before.whole_products > 0
    before, after = (attrs.astuple(attrs.evolve(each, whole_products=0)) for each in (before, after))
    assert sum(after) == pytest.approx(sum(before))


def test_in_16_bits_a_layer_keeps_no_scores_of_sinks(tmp_path):
    """Those of 4 heads, of 64 units and of 128, count in 32 bits, which `varlen` does not take."""
    sizes = {"vocab_size": 320, "hidden_size": 32, "intermediate_size": 32, "head_dim": 8, "sliding_window": 256}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
    kept = layer_of(tmp_path, config=GptOssConfig(**sizes, **heads, num_hidden_layers=2)).kept
    assert 2 * kept["bfloat16"].products < kept["float32"].products - 4 * 4 * (64 + 128) * 0.9


class OfFloat32(torch.nn.Linear):
    def forward(self, hidden):
        if self.weight.dtype == torch.bfloat16 or torch.is_autocast_enabled("cpu"):
            raise RuntimeError("not implemented for 'BFloat16'")
        return super().forward(hidden)


def test_a_dtype_in_which_a_model_does_not_run_is_left_out_alone():
    layer = OfFloat32(4, 4, device="meta")
    found = kept_by(layer, [layer], lambda units: lambda: layer(torch.zeros(units, 4)))
    assert {place: list(kept) for place, kept in found.items()} == {-1: ["float32"], -2: ["float32"], 0: ["float32"]}


def test_columns_of_feed_forward_layers_must_be_divided_by_whatever_name(subtests):
    for kind in ["llama", "opt"]:
        with subtests.test(kind=kind):
            shell = make_shell(layouts.config_of(kind), AutoModelForCausalLM, trust_remote_code=False)
            assert 48 in {
                extent.size
                for extent in extents_of(shell, plan_for(shell, {}))
                if extent.name == "columns of a feed-forward layer"
            }


def shell_of(config):
    return make_shell(config, AutoModelForCausalLM, trust_remote_code=False)


def test_matrices_are_those_of_the_layers():
    shell = shell_of(layouts.config_of("llama", tie_word_embeddings=False))
    found = matrices_of(shell)
    parameters = dict(shell.named_parameters())
    left = {name for name, parameter in parameters.items() if parameter.dim() > 1} - found.keys()
    assert left == {"model.embed_tokens.weight", "lm_head.weight"}
    assert found == {name: tuple(parameters[name].shape) for name in found}
    assert not any("norm" in name or "bias" in name for name in found)


def test_experts_are_matrices_where_they_lie_as_such_and_what_weighs_them_is_not(subtests):
    for kind in ["qwen3_moe", "deepseek_v3"]:
        with subtests.test(kind=kind):
            found = matrices_of(shell_of(layouts.config_of(kind)))
            assert {"gate_up_proj", "down_proj"} <= {
                name.rpartition("experts.")[2] for name in found if ".experts." in name
            }
            assert all(len(shape) == 3 for name, shape in found.items() if ".experts." in name)
            assert not any(name.endswith("mlp.gate.weight") for name in found)

    config = Qwen2MoeConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, num_experts=4, num_experts_per_tok=2
    )
    found = matrices_of(shell_of(config))
    assert "model.layers.0.mlp.shared_expert.down_proj.weight" in found
    assert "model.layers.0.mlp.shared_expert_gate.weight" not in found

    config = GptOssConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_local_experts=4,
    )
    found = matrices_of(shell_of(config))
    assert "model.layers.0.self_attn.q_proj.weight" in found
    assert not any("experts" in name for name in found)


def test_operations_are_what_torch_counts(subtests):
    same = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    experts = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
    latent = {
        "num_key_value_heads": 4,
        "head_dim": 4,
        "kv_lora_rank": 16,
        "q_lora_rank": 12,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
    }
    for config in [
        Qwen3Config(**same, num_key_value_heads=2, head_dim=8),
        Qwen2MoeConfig(**same, **experts, num_experts=4, num_key_value_heads=2),
        DeepseekV3Config(
            **same, **experts, **latent, n_routed_experts=4, first_k_dense_replace=1, n_group=1, topk_group=1
        ),
    ]:
        with subtests.test(config=config):
            model = AutoModelForCausalLM.from_config(
                config, attn_implementation="eager", experts_implementation="eager"
            )
            with FlopCounterMode(display=False) as counter:
                model(torch.arange(24)[None]).logits.sum().backward()
            counted = counter.get_flop_counts()["Global"]
            facts = ModelFacts(
                architecture="",
                num_parameters=0,
                num_layers=2,
                hidden_size=32,
                context_length=24,
                vocab_size=64,
                matrix_parameters=matrix_parameters(model),
                attention_width=attention_width(config),
            )
            # Eager attention computes the whole square; routers are left out.
            squares = 6 * facts.attention_width * 24**2
            assert facts.training_flops([24], 24) + squares == pytest.approx(sum(counted.values()), rel=0.02)
            assert facts.training_flops([12, 12], 24) + squares / 2 == pytest.approx(facts.training_flops([24], 24))
            assert facts.training_flops([24], 24, adapts=True) < facts.training_flops([24], 24)


def test_heads_have_one_size_or_none_is_told(subtests):
    for config, size, compressed in [
        (Qwen3Config(hidden_size=96, num_attention_heads=4, head_dim=24), 24, 0),
        (Qwen2Config(hidden_size=128, num_attention_heads=4), 32, 0),
        # Keys and values of latent attention differ, and are made of one row for all heads.
        (DeepseekV3Config(qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16), 0, 61 * (512 + 8)),
    ]:
        with subtests.test(config=config, size=size):
            assert (head_size(config), compressed_values(config)) == (size, compressed)
