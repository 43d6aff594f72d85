"""The family's conventions: where a completion ends, how a chat looks, what it is not for."""

import json

import pytest
import torch
from tokenizers import AddedToken
from transformers import AutoModelForCausalLM, AutoTokenizer

from cosmos_core.errors import ConfigError
from cosmos_core.models import HuggingFaceOptions, values
from cosmos_core.protocols import ModelContext
from cosmos_core.types import Message, Prompt
from cosmos_model_llama import Llama2Model, LlamaModel

TURNS = (Message(role="system", content="Be brief."), Message(role="user", content="How many?"))
STOPS = ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>")
TINY = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}
LLAMA_3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


def prepared(kind, folder, config):
    model = kind(HuggingFaceOptions(), ModelContext(path=None, config=config, assets=folder / "assets"))
    model.prepare(["How many? 3+4=7"], {"build": "byte-bpe", "vocab_size": 300, "split_digits": True})
    return model


@pytest.fixture
def model(tmp_path):
    return prepared(LlamaModel, tmp_path, {"model_type": "llama"})


@pytest.fixture
def tokenizer(model):
    """The local tokenizer, taught the family's special tokens as a checkpoint's would know them."""
    made = AutoTokenizer.from_pretrained(model.context.assets)
    made.add_special_tokens({"additional_special_tokens": [AddedToken(token, special=True) for token in STOPS]})
    made.save_pretrained(model.context.assets)
    return made


def test_the_familys_end_tokens_stop_a_completion(model, tokenizer):
    ids = {tokenizer.convert_tokens_to_ids(token) for token in STOPS}
    assert len(ids) == len(STOPS)
    assert model.facts().stop_ids == ids | {tokenizer.eos_token_id}


def test_a_chat_ends_its_turn_and_plain_text_ends_the_text(model, tokenizer):
    chat = model.encode_demonstration(Prompt(text=TURNS, demonstration="7"))
    plain = model.encode_demonstration(Prompt(text="How many?", demonstration="7"))
    assert values(chat, "completion")[-1] == tokenizer.convert_tokens_to_ids("<|eot_id|>")
    assert values(plain, "completion")[-1] == tokenizer.eos_token_id
    assert values(chat, "completion")[:-1].tolist() == values(plain, "completion")[:-1].tolist()
    assert model.decode(chat) == "7"


def test_the_default_chat_template(model):
    ids = values(model.encode(Prompt(text=TURNS)), "prompt").tolist()
    assert model.tokenizer.decode(ids) == (
        "<bos><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nHow many?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )


def test_another_family_is_refused_and_told_of_hf(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    model = LlamaModel(HuggingFaceOptions(), ModelContext(path=str(tmp_path), config=None, assets=tmp_path))
    with pytest.raises(ConfigError, match=r"'gpt2' is not one of this plugin's: llama.*'hf'"):
        model.facts()


def test_llama_2s_default_chat_template(tmp_path):
    model = prepared(Llama2Model, tmp_path, {"model_type": "llama"})
    turns = (
        Message(role="system", content="Be brief."),
        Message(role="user", content="One? "),
        Message(role="assistant", content="1"),
        Message(role="user", content="How many?"),
    )
    ids = values(model.encode(Prompt(text=turns)), "prompt").tolist()
    assert model.tokenizer.decode(ids) == (
        "<bos>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nOne? [/INST] 1 <eos><bos>[INST] How many? [/INST]"
    )
    plain = values(model.encode(Prompt(text=turns[1:2])), "prompt").tolist()
    assert model.tokenizer.decode(plain) == "<bos>[INST] One? [/INST]"


def test_llama_2_ends_a_turn_as_it_ends_a_text(tmp_path):
    model = prepared(Llama2Model, tmp_path, {"model_type": "llama"})
    tokenizer = AutoTokenizer.from_pretrained(model.context.assets)
    tokenizer.add_special_tokens({"additional_special_tokens": [AddedToken("</s>", special=True)]})
    tokenizer.save_pretrained(model.context.assets)
    end = tokenizer.convert_tokens_to_ids("</s>")
    assert model.facts().stop_ids == {end, tokenizer.eos_token_id}
    assert values(model.encode_demonstration(Prompt(text=TURNS, demonstration="7")), "completion")[-1] == end


def test_logits_are_those_of_transformers(tmp_path, subtests):
    for number, (kind, changes) in enumerate(
        [
            (Llama2Model, {"num_key_value_heads": 4, "tie_word_embeddings": False}),
            (Llama2Model, {"tie_word_embeddings": True}),
            (LlamaModel, {"rope_parameters": LLAMA_3_ROPE, "tie_word_embeddings": False, "head_dim": 8}),
            (LlamaModel, {"rope_parameters": LLAMA_3_ROPE, "tie_word_embeddings": True, "head_dim": 12}),
        ]
    ):
        with subtests.test(kind=kind, changes=changes):
            folder = tmp_path / str(number)
            model = prepared(kind, folder, {**TINY, **changes})
            module = model.build(seed=5, dtype=torch.float32, device=torch.device("cpu"))
            model.export(module, folder / "exported")
            lengths = (21, 6, 6, 3)
            tokens_U = torch.randint(0, 250, (sum(lengths),), generator=torch.Generator().manual_seed(3))
            with torch.no_grad():
                ours_UV = model._packed_logits(module, tokens_U, lengths)
                for attention in ("sdpa", "eager"):
                    theirs = AutoModelForCausalLM.from_pretrained(folder / "exported", attn_implementation=attention)
                    theirs_UV = torch.cat([theirs(part[None]).logits[0] for part in tokens_U.split(lengths)])
                    assert theirs_UV.std() > 0.1
                    torch.testing.assert_close(ours_UV, theirs_UV, atol=1e-5, rtol=1e-5)
