"""What Llama models do in a way of their own: where a completion ends, and how a chat looks."""

from __future__ import annotations

from typing import ClassVar, Final

from cosmos_core.policy.modeling import HuggingFaceModel

LLAMA_3_CHAT: Final = (
    "{{ bos_token }}{% for message in messages %}<|start_header_id|>{{ message.role }}<|end_header_id|>\n\n"
    "{{ message.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)


class LlamaModel(HuggingFaceModel):
    """A Llama model."""

    model_types: ClassVar[frozenset[str] | None] = frozenset({"llama"})
    turn_end: ClassVar[str | None] = "<|eot_id|>"
    stop_tokens: ClassVar[tuple[str, ...]] = ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>")
    turn_template: ClassVar[str | None] = LLAMA_3_CHAT
