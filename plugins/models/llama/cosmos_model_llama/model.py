"""Llama models: the tokens that end a completion, and the chat templates."""

from __future__ import annotations

from typing import ClassVar, Final

from cosmos_core.models import HuggingFaceModel

LLAMA_3_CHAT: Final = (
    "{{ bos_token }}{% for message in messages %}<|start_header_id|>{{ message.role }}<|end_header_id|>\n\n"
    "{{ message.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
LLAMA_2_CHAT: Final = (
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content | trim %}"
    "{% set turns = messages[1:] %}{% else %}{% set system = '' %}{% set turns = messages %}{% endif %}"
    "{% for message in turns %}"
    "{% if message.role == 'user' %}{{ bos_token }}[INST] "
    "{% if loop.first and system %}<<SYS>>\n{{ system }}\n<</SYS>>\n\n{% endif %}"
    "{{ message.content | trim }} [/INST]"
    "{% else %} {{ message.content | trim }} {{ eos_token }}{% endif %}{% endfor %}"
)


class LlamaModel(HuggingFaceModel):
    """A Llama 3 model."""

    model_types: ClassVar[frozenset[str] | None] = frozenset({"llama"})
    turn_end: ClassVar[str | None] = "<|eot_id|>"
    stop_tokens: ClassVar[tuple[str, ...]] = ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>")
    turn_template: ClassVar[str | None] = LLAMA_3_CHAT


class Llama2Model(HuggingFaceModel):
    """A Llama 2 model: the same architecture, another chat format."""

    model_types: ClassVar[frozenset[str] | None] = frozenset({"llama"})
    turn_end: ClassVar[str | None] = "</s>"
    stop_tokens: ClassVar[tuple[str, ...]] = ("</s>",)
    turn_template: ClassVar[str | None] = LLAMA_2_CHAT
