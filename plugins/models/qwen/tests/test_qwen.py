"""The family's conventions: where a completion ends, how a chat looks, what it is not for."""

import json

import pytest
from tokenizers import AddedToken
from transformers import AutoTokenizer

from cosmos_core.errors import ConfigError
from cosmos_core.policy.modeling import HuggingFaceOptions, values
from cosmos_core.protocols import ModelContext
from cosmos_core.types import Message, Prompt
from cosmos_model_qwen import QwenModel

TURNS = (Message(role="system", content="Be brief."), Message(role="user", content="How many?"))
STOPS = ("<|im_end|>", "<|endoftext|>")


@pytest.fixture
def model(tmp_path):
    context = ModelContext(path=None, config={"model_type": "qwen3"}, assets=tmp_path / "assets")
    model = QwenModel(HuggingFaceOptions(), context)
    model.prepare(["How many? 3+4=7"], {"build": "byte-bpe", "vocab_size": 300, "split_digits": True})
    return model


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
