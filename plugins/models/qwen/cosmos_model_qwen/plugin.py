"""Qwen models: the tokens that end a completion, and the chat template."""

from __future__ import annotations

from typing import ClassVar, Final

from cosmos_core.models import CAPABILITIES, HuggingFaceModel, HuggingFaceOptions
from cosmos_core.protocols import Model, Provider, hookimpl

CHATML: Final = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class QwenModel(HuggingFaceModel):
    """A dense Qwen model."""

    model_types: ClassVar[frozenset[str] | None] = frozenset({"qwen2", "qwen3"})
    turn_end: ClassVar[str | None] = "<|im_end|>"
    stop_tokens: ClassVar[tuple[str, ...]] = ("<|im_end|>", "<|endoftext|>")
    turn_template: ClassVar[str | None] = CHATML


@hookimpl
def cosmos_model() -> Provider[Model]:
    """Provide the Qwen family."""
    return Provider(create=QwenModel, options=HuggingFaceOptions, capabilities=CAPABILITIES)
