"""The families' conventions: where a completion ends, how a chat looks, what they are not for; and their logits."""

import json

import pytest
import torch
from tokenizers import AddedToken
from transformers import AutoModelForCausalLM, AutoTokenizer

from cosmos_core.errors import ConfigError
from cosmos_core.models import values
from cosmos_core.protocols import ModelContext
from cosmos_core.types import Message, Prompt
from cosmos_model_moe import DeepseekModel, MixtureOptions, MoonlightModel, QwenMoeModel

TURNS = (
    Message(role="system", content="Be brief."),
    Message(role="user", content="One?"),
    Message(role="assistant", content="1"),
    Message(role="user", content="How many?"),
)
STOPS = {
    "qwen3-moe": ("<|im_end|>", "<|endoftext|>"),
    "deepseek": ("<｜end▁of▁sentence｜>",),
    "moonlight": ("<|im_end|>", "[EOS]", "[EOT]"),
}
CHATS = {
    "qwen3-moe": (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nOne?<|im_end|>\n"
        "<|im_start|>assistant\n1<|im_end|>\n<|im_start|>user\nHow many?<|im_end|>\n<|im_start|>assistant\n"
    ),
    "deepseek": "<bos>Be brief.<｜User｜>One?<｜Assistant｜>1<｜end▁of▁sentence｜><｜User｜>How many?<｜Assistant｜>",
    "moonlight": (
        "<|im_system|>system<|im_middle|>Be brief.<|im_end|><|im_user|>user<|im_middle|>One?<|im_end|>"
        "<|im_assistant|>assistant<|im_middle|>1<|im_end|><|im_user|>user<|im_middle|>How many?<|im_end|>"
        "<|im_assistant|>assistant<|im_middle|>"
    ),
}


@pytest.mark.nightly
@pytest.mark.parametrize("family", STOPS)
def test_turns_and_completions_end_as_the_family_does(make, family):
    model = make(family)
    tokenizer = AutoTokenizer.from_pretrained(model.context.assets)
    special = [AddedToken(token, special=True) for token in STOPS[family]]
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    tokenizer.save_pretrained(model.context.assets)
    ids = {tokenizer.convert_tokens_to_ids(token) for token in STOPS[family]}
    assert model.facts().stop_ids == ids | {tokenizer.eos_token_id}
    chat = model.encode_demonstration(Prompt(text=TURNS, demonstration="7"))
    plain = model.encode_demonstration(Prompt(text="How many?", demonstration="7"))
    assert values(chat, "completion")[-1] == tokenizer.convert_tokens_to_ids(STOPS[family][0])
    assert values(plain, "completion")[-1] == tokenizer.eos_token_id


def test_the_default_chat_template(make, subtests):
    for family, shown in CHATS.items():
        with subtests.test(family=family):
            model = make(family)
            assert model.tokenizer.decode(values(model.encode(Prompt(text=TURNS)), "prompt").tolist()) == shown


def test_another_family_is_refused_and_told_of_hf(tmp_path, subtests):
    for kind in [QwenMoeModel, DeepseekModel, MoonlightModel]:
        with subtests.test(kind=kind):
            (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
            model = kind(MixtureOptions(), ModelContext(path=str(tmp_path), config=None, assets=tmp_path))
            with pytest.raises(ConfigError, match=r"'qwen3' is not one of this plugin's: .*'hf'"):
                model.facts()


def test_moonlights_checkpoint_is_no_deepseek(make):
    model = make("deepseek")
    tokenizer = AutoTokenizer.from_pretrained(model.context.assets)
    tokenizer.add_special_tokens({"additional_special_tokens": [AddedToken("<|im_middle|>", special=True)]})
    tokenizer.save_pretrained(model.context.assets)
    with pytest.raises(ConfigError, match=r"model\.plugin = 'moonlight'"):
        model.facts()


def test_logits_are_those_of_transformers(make, build, tmp_path, subtests):
    for number, (family, changes) in enumerate(
        [
            ("qwen3-moe", {}),
            ("qwen3-moe", {"tie_word_embeddings": True, "norm_topk_prob": False, "mlp_only_layers": [1]}),
            ("deepseek", {}),
            ("deepseek", {"norm_topk_prob": False, "rope_interleave": False, "tie_word_embeddings": True}),
            ("moonlight", {}),
        ]
    ):
        with subtests.test(family=family, changes=changes):
            model = make(family, changes)
            module = build(model)
            folder = tmp_path / f"exported {number}"
            model.export(module, folder)
            lengths = (11, 6, 6, 3)
            tokens_U = torch.randint(0, 250, (sum(lengths),), generator=torch.Generator().manual_seed(3))
            with torch.no_grad():
                ours_UV = model._packed_logits(module, tokens_U, lengths)
                for attention in ("sdpa", "eager"):
                    theirs = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=attention)
                    theirs_UV = torch.cat([theirs(part[None]).logits[0] for part in tokens_U.split(lengths)])
                    assert theirs_UV.std() > 0.1
                    torch.testing.assert_close(ours_UV, theirs_UV, atol=1e-5, rtol=1e-5)
