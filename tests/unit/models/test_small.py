"""A model is tried on a small one of its make: whether its documents pack, and what it gives is its own."""

import logging
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from cosmos_core.config.schema import MeshConfig
from cosmos_core.errors import PluginIncompatibleError
from cosmos_core.models import PACKED, HuggingFaceModel, HuggingFaceOptions, values
from cosmos_core.models.small import tiny_configs, verify_tiny
from cosmos_core.policy.mesh.mesh import form_mesh
from cosmos_core.protocols import Layout, ModelContext
from cosmos_core.testing.worlds import run_world
from tests.families import text_payloads


class Scaled(HuggingFaceModel):
    def logits(self, module, hidden_ND):
        return super().logits(module, hidden_ND) * 1.01


class Mixing(HuggingFaceModel):
    """Lets all documents of a row see one another."""

    def _text_batch(self, tokens_U, lengths):
        return super()._text_batch(tokens_U, [sum(lengths)])


def refusal(make, config, sizes):
    """What a process of a spread model is told."""
    torch.set_num_threads(1)
    model = make(HuggingFaceOptions(), ModelContext(path=None, config=config, assets=Path("/none")))
    layout = Layout(mesh=form_mesh(MeshConfig(**sizes), "cpu"))
    try:
        model.build(seed=0, dtype=torch.float32, device=torch.device("cpu"), layout=layout)
    except PluginIncompatibleError as error:
        return str(error)
    return None


def test_a_spread_model_is_refused_by_all_processes_alike_or_built(subtests, config):
    for make, told in [(Scaled, "logits differ from its own forward"), (Mixing, None), (HuggingFaceModel, None)]:
        with subtests.test(make=make):
            first, second = run_world(2, refusal, make, config, {"dp_shard": 2})
            assert first == second
            assert first is None if told is None else told in first


SMALL = {"vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2}
RECURRENT = {**SMALL, "model_type": "mamba", "hidden_size": 16, "state_size": 4, "num_hidden_layers": 2}
OF_ITS_OWN = {**SMALL, "model_type": "gptj", "n_embd": 16, "n_head": 2, "n_layer": 2, "rotary_dim": 4}
BOTH_WAYS = {"model_type": "xlm", "n_words": 64, "emb_dim": 16, "n_heads": 2, "n_layers": 2, "embed_init_std": 0.5}


def test_a_model_that_cannot_pack_trains_one_document_a_row(subtests, tmp_path, config):
    for given, reason in [(RECURRENT, "linear_attention layers"), (OF_ITS_OWN, PACKED), (config, "packed logits")]:
        with subtests.test(model_type=given["model_type"]):
            make = Mixing if given is config else HuggingFaceModel
            model = make(HuggingFaceOptions(), ModelContext(path=None, config=given, assets=tmp_path))
            assert reason in model.alone_because
            module = model.build(seed=0, dtype=torch.float32, device=torch.device("cpu"))
            payloads = text_payloads(vocabulary=64)
            batches = model.pack(payloads, budget=200)
            assert sorted(index for batch in batches for index in batch.sequences) == list(range(len(payloads)))
            for batch in batches:
                (payload,) = (payloads[index] for index in batch.sequences)
                found = model.decide(module, batch, temperature=1.0).logprobs_N
                prompt, completion = (torch.tensor(values(payload, name)) for name in ("prompt", "completion"))
                whole, number = torch.cat([prompt, completion]), len(completion)
                own = module(input_ids=whole[None]).logits[0, -number - 1 : -1].log_softmax(-1)
                torch.testing.assert_close(found, own.gather(-1, whole[-number:, None])[:, 0], atol=1e-5, rtol=1e-5)


def test_a_model_that_sees_later_units_is_refused(tmp_path):
    model = HuggingFaceModel(HuggingFaceOptions(), ModelContext(path=None, config=BOTH_WAYS, assets=tmp_path))
    with pytest.raises(PluginIncompatibleError, match="XLMWithLMHeadModel is not causal"):
        assert model.alone_because


LARGE = {
    "qwen3": {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 12288},
    "gpt_oss": {"num_hidden_layers": 24},
    "gemma3_text": {"hidden_size": 3840, "num_attention_heads": 32, "num_key_value_heads": 16, "num_hidden_layers": 48},
    "deepseek_v3": {},
}
DEPTHS = {"qwen3": 1, "gpt_oss": 2, "gemma3_text": 6, "deepseek_v3": 4}
KINDS = {"qwen3": 1, "gpt_oss": 1, "gemma3_text": 1, "deepseek_v3": 2}
"""Of feed-forward blocks."""


def tried(make, config, tmp_path):
    """The small models that a model is checked on."""
    model = make(HuggingFaceOptions(), ModelContext(path=None, config=config, assets=tmp_path))
    small = []

    def verify(module):
        small.append(module)
        model.verify(module)

    verify_tiny(model._blueprint(seed=0, dtype=torch.bfloat16, device=torch.device("meta")), verify)
    return small


def test_a_large_model_is_checked_on_a_small_one_with_every_kind_of_layer(subtests, tmp_path):
    for number, model_type in enumerate(["gpt_oss", "deepseek_v3"]):
        with subtests.test(model_type=model_type):
            folder = tmp_path / str(number)
            folder.mkdir()
            check_large(folder, model_type)


def check_large(tmp_path, model_type):
    config = {"model_type": model_type, **LARGE[model_type]}
    (small,) = tried(HuggingFaceModel, config, tmp_path)
    assert small.num_parameters() < 30e6
    assert small.config.num_hidden_layers == DEPTHS[model_type]
    assert len({type(layer.mlp) for layer in small.model.layers}) == KINDS[model_type]
    listed = getattr(AutoConfig.for_model(**config), "layer_types", None) or ()
    assert set(getattr(small.config, "layer_types", None) or ()) == set(listed)
    with pytest.raises(PluginIncompatibleError, match="logits differ"):
        tried(Scaled, config, tmp_path)


WIDE = {"hidden_size": 576, "head_dim": 64, "num_hidden_layers": 2, "intermediate_size": 1536, "vocab_size": 64}
COUNTS = ("num_attention_heads", "num_key_value_heads", "hidden_size")


def small_of(tmp_path, **config):
    shell = HuggingFaceModel(
        HuggingFaceOptions(), ModelContext(path=None, config={**WIDE, **config}, assets=tmp_path)
    )._shell()
    return next(tiny_configs(shell, keeps_ids=False))


def test_two_processes_share_heads_and_experts_of_a_small_model(subtests, tmp_path):
    for heads, shared, left in [(9, 3, (4, 2)), (28, 4, (4, 2)), (9, 9, (4, 4)), (9, 1, (4, 1)), (2, 1, (2, 1))]:
        with subtests.test(heads=heads, shared=shared):
            small = small_of(tmp_path, model_type="qwen3", num_attention_heads=heads, num_key_value_heads=shared)
            assert tuple(getattr(small, name) for name in COUNTS) == (*left, 576 * left[0] // heads)
    for kind, name, others in [
        ("mixtral", "num_local_experts", {"num_key_value_heads": 4, "num_experts_per_tok": 3}),
        ("qwen3_moe", "num_experts", {"num_key_value_heads": 4}),
        ("ernie4_5_moe", "moe_num_experts", {"num_key_value_heads": 4}),
    ]:
        with subtests.test(kind=kind):
            for number, left in [(9, 18), (8, 8)]:
                small = small_of(tmp_path, model_type=kind, num_attention_heads=4, **{name: number}, **others)
                assert getattr(small, name) == left


def test_a_model_of_which_no_small_one_can_be_tried_goes_unchecked_and_says_so(tmp_path, config, caplog):
    class Failing(HuggingFaceModel):
        def verify(self, module):
            raise ValueError("its numbers do not fit")

    with caplog.at_level(logging.WARNING):
        assert len(tried(Failing, config, tmp_path)) == 2
    assert "qwen3 is not compared with transformers' own forward: " in caplog.text
    assert "(its numbers do not fit)" in caplog.text
