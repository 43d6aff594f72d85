"""What Llama models do in a way of their own: where a completion ends, and how a chat looks."""

from __future__ import annotations

from typing import ClassVar, Final

import attrs
from transformers import PreTrainedTokenizerBase

from cosmos_core.policy.modeling import HuggingFaceModel, tokens_payload, values
from cosmos_core.protocols import ModelFacts
from cosmos_core.types import Payload, Prompt

END_OF_TURN: Final = "<|eot_id|>"
STOPS: Final = (END_OF_TURN, "<|eom_id|>", "<|end_of_text|>")

LLAMA_3_CHAT: Final = (
    "{{ bos_token }}{% for message in messages %}<|start_header_id|>{{ message.role }}<|end_header_id|>\n\n"
    "{{ message.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)


class LlamaModel(HuggingFaceModel):
    """A Llama model."""

    model_types: ClassVar[frozenset[str] | None] = frozenset({"llama"})

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer; Llama 3's chat template is used if it has none."""
        tokenizer = super().tokenizer
        if tokenizer.chat_template is None:
            tokenizer.chat_template = LLAMA_3_CHAT
        return tokenizer

    def facts(self) -> ModelFacts:
        """Describe the model; each of the family's end tokens stops a completion."""
        facts = super().facts()
        vocabulary = self.tokenizer.get_vocab()
        known = {vocabulary[token] for token in STOPS if token in vocabulary}
        return attrs.evolve(facts, stop_ids=facts.stop_ids | known)

    def encode_demonstration(self, prompt: Prompt) -> Payload:
        """The prompt and its demonstration; a chat's ends with the token that ends a turn.

        Raises:
            DataError: The prompt has no demonstration, or cannot be encoded.
        """
        payload = super().encode_demonstration(prompt)
        end_id = self.tokenizer.get_vocab().get(END_OF_TURN)
        if isinstance(prompt.text, str) or end_id is None:
            return payload
        completion = [*values(payload, "completion").tolist()[:-1], end_id]
        return tokens_payload(values(payload, "prompt").tolist(), completion)
