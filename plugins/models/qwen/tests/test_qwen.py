"""The family's conventions: where a completion ends, how a chat looks, what it is not for."""

import itertools
import json

import pytest
import torch
from tokenizers import AddedToken
from transformers import AutoModelForCausalLM, AutoTokenizer

from cosmos_core.errors import ConfigError
from cosmos_core.models import HuggingFaceOptions, values
from cosmos_core.protocols import ModelContext
from cosmos_core.types import Message, Prompt
from cosmos_model_qwen import QwenModel

TURNS = (Message(role="system", content="Be brief."), Message(role="user", content="How many?"))
STOPS = ("<|im_end|>", "<|endoftext|>")
TINY = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}


def prepared(folder, config):
    model = QwenModel(HuggingFaceOptions(), ModelContext(path=None, config=config, assets=folder / "assets"))
    model.prepare(["How many? 3+4=7"], {"build": "byte-bpe", "vocab_size": 300, "split_digits": True})
    return model


@pytest.fixture
def model(tmp_path):
    return prepared(tmp_path, {"model_type": "qwen3"})


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
    assert values(chat, "completion")[-1] == tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert values(plain, "completion")[-1] == tokenizer.eos_token_id
    assert values(chat, "completion")[:-1].tolist() == values(plain, "completion")[:-1].tolist()
    assert model.decode(chat) == "7"


def test_the_default_chat_template(model):
    ids = values(model.encode(Prompt(text=TURNS)), "prompt").tolist()
    assert model.tokenizer.decode(ids) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHow many?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_another_family_is_refused_and_told_of_hf(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    model = QwenModel(HuggingFaceOptions(), ModelContext(path=str(tmp_path), config=None, assets=tmp_path))
    with pytest.raises(ConfigError, match=r"'gpt2' is not one of this plugin's: qwen2, qwen3.*'hf'"):
        model.facts()


def test_logits_are_those_of_transformers(tmp_path, subtests):
    for number, (is_tied, family) in enumerate(
        itertools.product(
            [True, False],
            [
                {"model_type": "qwen2"},
                {"model_type": "qwen3", "head_dim": 12},
                {
                    "model_type": "qwen3",
                    "use_sliding_window": True,
                    "sliding_window": 5,
                    "layer_types": ["full_attention", "sliding_attention"],
                },
            ],
        )
    ):
        with subtests.test(is_tied=is_tied, family=family):
            folder = tmp_path / str(number)
            model = prepared(folder, {**TINY, **family, "tie_word_embeddings": is_tied})
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
