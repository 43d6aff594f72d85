import attrs
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from cosmos_core.errors import ConfigError, PluginIncompatibleError
from cosmos_core.models import PACKED
from cosmos_core.models.attention.documents import Packing
from cosmos_core.models.parallel.stages import Stages, cut, part_of, stages_of
from cosmos_core.protocols import Layout

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.2,
}
EXTRA = {
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "kv_lora_rank": 16,
        "q_lora_rank": None,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
    },
}
CUTTABLE = ("qwen3", "llama", "gpt_neox", "gemma3_text", "qwen3_moe", "deepseek_v3", "phi", "olmo2", "starcoder2")


@attrs.frozen
class Pipe:
    """The only axis that cutting asks for."""

    num: int
    at: int

    def size(self, axis):
        return self.num if axis == "pp" else 1

    def place(self, axis):
        return self.at if axis == "pp" else 0


def shell(kind, is_tied=True, device="meta", layers=4):
    sizes = {**SIZES, "num_hidden_layers": layers, "tie_word_embeddings": is_tied, **EXTRA.get(kind, {})}
    config = AutoConfig.for_model(kind, **sizes)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, attn_implementation=PACKED)


def layout(num, at, **options):
    return Layout(mesh=Pipe(num, at), **options)


def names(module):
    return [name for name, _ in module.named_parameters()]


def test_stages_have_all_parameters_under_their_names():
    for is_tied in [True, False]:
        for kind in CUTTABLE:
            whole = shell(kind, is_tied)
            tied = next(name for name in names(whole) if "embed" in name)
            held = [names(Stages(cut(whole, layout(3, at)))) for at in range(3)]
            assert set().union(*held) == set(names(whole))
            common = set(held[0]) & set(held[2])
            assert common == ({tied} if is_tied else set())
            assert sum(map(len, held)) == len(names(whole)) + is_tied
            assert any(".norm." in name or "final_layer" in name for name in held[2])


def test_the_whole_model_stays_as_it_is():
    whole = shell("qwen3")
    before = names(whole)
    cut(whole, layout(2, 1))
    assert names(whole) == before
    assert part_of(whole) is None
    assert stages_of(whole) == [whole]


def test_a_process_with_both_ends_lists_a_tied_parameter_once_and_shares_it():
    whole = shell("qwen3", device="cpu")
    module = Stages(cut(whole, layout(2, 0, stages_per_rank=2, is_v_shaped=True)))
    first, last = stages_of(module)
    assert [part_of(stage).index for stage in (first, last)] == [0, 3]
    assert last.lm_head.weight is first.model.embed_tokens.weight
    assert names(module).count("model.embed_tokens.weight") == 1
    assert "lm_head.weight" not in names(module)
    assert module.copies == []

    stages = cut(shell("qwen3", device="cpu"), layout(2, 0, stages_per_rank=2, is_v_shaped=True))
    stages[1].lm_head.weight = torch.nn.Parameter(stages[1].lm_head.weight.detach().clone())
    module = Stages(stages)
    assert stages[1].lm_head.weight is stages[0].model.embed_tokens.weight
    assert len(names(module)) == len(set(names(module)))


def test_saved_tensors_have_the_names_of_the_whole_model():
    whole = shell("deepseek_v3", device="cpu")
    wanted = whole.state_dict()
    found = {}
    for at in range(2):
        state = Stages(cut(whole, layout(2, at))).state_dict()
        assert all(torch.equal(tensor, wanted[name]) for name, tensor in state.items())
        found |= state
    # A tied parameter goes by the name under which the whole model lists it.
    assert set(found) == set(wanted) - {"lm_head.weight"}
    buffers = {name for at in range(2) for name, _ in Stages(cut(whole, layout(2, at))).named_buffers()}
    assert buffers == {name for name, _ in whole.named_buffers()}


def test_one_stage_after_the_other_is_the_model():
    for kind in CUTTABLE:
        whole = shell(kind, device="cpu", layers=5).eval()
        tokens = torch.arange(1, 12)[None]
        positions = torch.arange(11)[None]
        options = {"position_ids": positions, "use_cache": False, "packing": Packing.of([11], torch.device("cpu"))}
        wanted = whole(input_ids=tokens, **options).logits
        entry = {"input_ids": tokens}
        for at in range(2):
            (stage,) = cut(whole, layout(3, at))
            entry = {"inputs_embeds": stage.base_model(**entry, **options).last_hidden_state}
        (stage,) = cut(whole, layout(3, 2))
        torch.testing.assert_close(stage(**entry, **options).logits, wanted, rtol=0, atol=0)


def test_a_vision_tower_is_on_the_first_stage_only():
    config = AutoConfig.for_model(
        "qwen2_5_vl",
        text_config={
            **SIZES,
            "num_hidden_layers": 4,
            "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0},
        },
        vision_config={"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 4, "out_hidden_size": 32},
        tie_word_embeddings=False,
    )
    with torch.device("meta"):
        whole = AutoModelForImageTextToText.from_config(config, attn_implementation={"text_config": PACKED})
    held = [names(Stages(cut(whole, layout(2, at)))) for at in range(2)]
    assert sorted(held[0] + held[1]) == sorted(names(whole))
    assert any(".visual." in name for name in held[0])
    assert not any(".visual." in name or "embed_tokens" in name for name in held[1])


def test_models_that_cannot_be_cut_are_refused():
    with pytest.raises(ConfigError, match="6 pipeline stages need as many layers, and the model has 4"):
        cut(shell("qwen3"), layout(3, 0, stages_per_rank=2))

    for kind, message in [
        ("gpt2", "weights outside its layers .*: wpe"),
        ("granite", "changes hidden states outside its layers"),
    ]:
        with pytest.raises(PluginIncompatibleError, match=message):
            cut(shell(kind), layout(2, 0))
