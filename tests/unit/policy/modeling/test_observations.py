"""How observations become tokens: what the chat template writes after a turn of the model, and nothing twice."""

import pytest

from cosmos_core.errors import DataError
from cosmos_core.policy.modeling import HuggingFaceModel, HuggingFaceOptions
from cosmos_core.protocols import ModelContext
from cosmos_core.types import Message, Prompt

QWEN3 = {"model_type": "qwen3", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 8}
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TRIMMED = "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content | trim }}<eos>{% endfor %}[assistant] "
CHAT = Prompt(text=(Message(role="system", content="Be brief."), Message(role="user", content="%answer%?")))


class ChatModel(HuggingFaceModel):
    turn_end = "<|im_end|>"
    stop_tokens = ("<|im_end|>",)
    template = CHATML

    @property
    def tokenizer(self):
        tokenizer = super().tokenizer
        if "<|im_end|>" not in tokenizer.get_vocab():
            tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
        tokenizer.chat_template = self.template
        return tokenizer


@pytest.fixture
def model(tmp_path):
    assets = tmp_path / "assets"
    assets.mkdir()
    made = ChatModel(HuggingFaceOptions(), ModelContext(path=None, config=QWEN3, assets=assets))
    made.prepare(["Be brief. What is it? answer"], {"build": "byte-bpe", "vocab_size": 280, "split_digits": True})
    return made


def ids(model, text):
    return model.tokenizer(text, add_special_tokens=False)["input_ids"]


def token(model, text):
    return model.tokenizer.convert_tokens_to_ids(text)


def after(model, observation, *, prompt=CHAT, end="<|im_end|>"):
    written = [*ids(model, "4+4="), *([token(model, end)] if end else [])]
    return model.tokenizer.decode(model.encode_observation(prompt, written, observation))


def test_a_chat_goes_on_with_a_turn_of_the_user(model):
    assert after(model, "8 ") == "\n<|im_start|>user\n8 <|im_end|>\n<|im_start|>assistant\n"


def test_prompt_turns_and_observations_are_what_the_template_writes_of_the_whole(model):
    """Joined, the pieces are the chat as it would have been encoded in one piece."""
    turns = (*CHAT.text, Message(role="assistant", content="4+4="), Message(role="user", content="It is 8."))
    written = [*ids(model, "4+4="), token(model, "<|im_end|>")]
    pieces = [*model.prompt_ids(CHAT), *written, *model.encode_observation(CHAT, written, "It is 8.")]
    assert pieces == model.prompt_ids(Prompt(text=turns))


def test_another_stop_token_ends_the_turn_just_as_well(model):
    assert after(model, "8", end="<eos>").startswith("\n<|im_start|>user")


def test_a_turn_that_was_not_ended_is_ended(model):
    assert after(model, "8", end="").startswith("<|im_end|>\n<|im_start|>user")


def test_words_of_the_kits_own_mark_are_words(model):
    assert "%answer% and %answer%%answer%" in after(model, "%answer% and %answer%%answer%")


def test_a_template_that_trims_and_begins_with_special_tokens(model, monkeypatch):
    monkeypatch.setattr(ChatModel, "template", TRIMMED)
    assert after(model, " 8 \n", end="<eos>") == "[user] 8<eos>[assistant] "


def test_plain_text_stays_as_it_is(model):
    assert after(model, " 8\n", prompt=Prompt(text="4+4?")) == " 8\n"
    assert model.encode_observation(Prompt(text="4+4?"), [1], "") == []


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{{ raise_exception('one turn only') }}", "one turn only"),
        ("{{ messages[-1].content }}", "leaves out the model's turn"),
    ],
)
def test_a_template_that_takes_no_such_turns_is_a_data_error(model, monkeypatch, template, why):
    monkeypatch.setattr(ChatModel, "template", template)
    with pytest.raises(DataError, match=why):
        after(model, "8")
