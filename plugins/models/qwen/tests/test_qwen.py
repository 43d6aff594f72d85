"""The family's conventions, and logits against transformers' own."""

import json

import pytest
import torch
from tokenizers import AddedToken
from transformers import AutoModelForCausalLM, AutoTokenizer

from cosmos_core.errors import ConfigError
from cosmos_core.policy.modeling import HuggingFaceOptions, values
from cosmos_core.protocols import ModelContext
from cosmos_core.types import Message, Prompt
from cosmos_model_qwen import QwenModel
from cosmos_model_qwen.plugin import cosmos_model

TINY = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
    "initializer_range": 0.3,
}
CORPUS = ["Ann has 3 apples. How many now?\n3+4=7\n#### 7"] * 3
TURNS = (Message(role="system", content="Be brief."), Message(role="user", content="How many?"))
STOPS = ("<|im_end|>", "<|endoftext|>")
TYPES = ("qwen3", "qwen2")


def make(directory, model_type=TYPES[0], options=None, **config):
    context = ModelContext(path=None, config={"model_type": model_type, **TINY, **config}, assets=directory / "assets")
    model = QwenModel(options or HuggingFaceOptions(), context)
    model.prepare(CORPUS, {"build": "byte-bpe", "vocab_size": 300, "split_digits": True})
    return model


def add_tokens(model, *tokens):
    """Teach the local tokenizer the family's special tokens, as a checkpoint's would know them."""
    made = AutoTokenizer.from_pretrained(model.context.assets)
    made.add_special_tokens({"additional_special_tokens": [AddedToken(token, special=True) for token in tokens]})
    made.save_pretrained(model.context.assets)
    return made


@pytest.mark.parametrize("model_type", TYPES)
def test_logits_equal_transformers_own(tmp_path, model_type):
    torch.set_num_threads(1)
    model = make(tmp_path, model_type)
    module = model.build(seed=0, dtype=torch.float32, device=torch.device("cpu"))
    prompts = [
        Prompt(text="Ann has 3 apples.", demonstration="3+4=7\n#### 7"),
        Prompt(text="How many?", demonstration="####"),
    ]
    payloads = [model.encode_demonstration(prompt) for prompt in prompts]
    (batch,) = model.pack(payloads, budget=4096)
    ours_N = model.decide(module, batch, temperature=1.0).logprobs_N
    model.export(module, tmp_path / "export")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype=torch.float32)
    expected = []
    for index in batch.sequences:
        prompt, completion = (values(payloads[index], name).tolist() for name in ("prompt", "completion"))
        tokens_BU = torch.tensor([prompt + completion])
        logprobs_UV = theirs(tokens_BU).logits[0].log_softmax(-1)
        expected.append(logprobs_UV[len(prompt) - 1 : -1].gather(-1, torch.tensor(completion)[:, None])[:, 0])
    torch.testing.assert_close(ours_N, torch.cat(expected), atol=2e-5, rtol=2e-5)
    assert type(theirs).__name__ == model.facts().architecture


def test_facts(tmp_path):
    model = make(tmp_path)
    facts = model.facts()
    module = model.build(seed=0, dtype=torch.float32, device=torch.device("cpu"))
    assert facts.num_parameters == sum(parameter.numel() for parameter in module.parameters())
    assert (facts.num_layers, facts.hidden_size, facts.context_length) == (2, 32, 64)
    assert facts.vocab_size == facts.tokenizer_size


def test_the_familys_end_tokens_stop_a_completion(tmp_path):
    model = make(tmp_path)
    tokenizer = add_tokens(model, *STOPS)
    ids = {tokenizer.convert_tokens_to_ids(token) for token in STOPS}
    assert len(ids) == len(STOPS)
    assert model.facts().stop_ids == ids | {tokenizer.eos_token_id}


def test_a_tokenizer_without_them_stops_at_its_own(tmp_path):
    model = make(tmp_path)
    assert model.facts().stop_ids == {model.tokenizer.eos_token_id}


def test_a_chat_ends_its_turn_and_plain_text_ends_the_text(tmp_path):
    model = make(tmp_path)
    tokenizer = add_tokens(model, *STOPS)
    chat = model.encode_demonstration(Prompt(text=TURNS, demonstration="7"))
    plain = model.encode_demonstration(Prompt(text="How many?", demonstration="7"))
    assert values(chat, "completion")[-1] == tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert values(plain, "completion")[-1] == tokenizer.eos_token_id
    assert values(chat, "completion")[:-1].tolist() == values(plain, "completion")[:-1].tolist()
    assert values(chat, "prompt").tolist() == values(model.encode(Prompt(text=TURNS)), "prompt").tolist()
    assert model.decode(chat) == "7"


def test_the_default_chat_template(tmp_path):
    model = make(tmp_path)
    ids = values(model.encode(Prompt(text=TURNS)), "prompt").tolist()
    assert model.tokenizer.decode(ids) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHow many?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_template_of_the_recipe_comes_first(tmp_path):
    template = "{% for message in messages %}[{{ message.content }}]{% endfor %}"
    model = make(tmp_path, options=HuggingFaceOptions(chat_template=template))
    ids = values(model.encode(Prompt(text=TURNS)), "prompt").tolist()
    assert model.tokenizer.decode(ids) == "[Be brief.][How many?]"


def test_another_family_is_refused_and_told_of_hf(tmp_path):
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    model = QwenModel(HuggingFaceOptions(), ModelContext(path=str(checkpoint), config=None, assets=tmp_path))
    with pytest.raises(ConfigError, match=r"'gpt2' is not one of this plugin's: qwen2, qwen3.*'hf'"):
        model.facts()


def test_the_provider(tmp_path):
    provider = cosmos_model()
    context = ModelContext(path=None, config={"model_type": TYPES[0], **TINY}, assets=tmp_path)
    assert isinstance(provider.create(provider.options(), context), QwenModel)
    assert provider.capabilities.payload_kinds == {"tokens"}
