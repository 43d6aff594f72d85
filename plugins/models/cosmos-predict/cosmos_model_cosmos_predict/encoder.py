"""Captions through Qwen2.5-VL, which is never trained.

An embedding is the hidden states of all layers side by side, each normalised, of the caption as a turn of a chat that
is filled up to a length; padding is attended to and is part of it.

Source: `Cosmos2_5_PredictBasePipeline` of diffusers 0.42.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoTokenizer

from cosmos_core.models.diffusion import Part

_SYSTEM: Final = "You are a helpful assistant who will provide prompts to an image generator."


class TextEncoder:
    """Qwen2.5-VL.

    Args:
        part: A Qwen2_5_VLForConditionalGeneration.
        tokenizer: Folder of its tokenizer.
    """

    def __init__(self, part: Part, tokenizer: Path) -> None:
        self._tokenizer: Any = AutoTokenizer.from_pretrained(tokenizer)
        self._part: Final = part

    @torch.no_grad()
    def encode(self, words: str, length: int) -> torch.Tensor:
        """float32 [length, layers · width]; what is longer is cut off."""
        turns = [
            {"role": role, "content": [{"type": "text", "text": text}]}
            for role, text in (("system", _SYSTEM), ("user", words))
        ]
        found = self._tokenizer.apply_chat_template(
            turns,
            tokenize=True,
            add_generation_prompt=False,
            add_vision_id=False,
            max_length=length,
            truncation=True,
            padding="max_length",
        )
        with self._part.used() as (module, device):
            states = module(torch.tensor([found["input_ids"]], device=device), output_hidden_states=True).hidden_states
        normal = [(each - each.mean(-1, keepdim=True)) / (each.std(-1, keepdim=True) + 1e-8) for each in states[1:]]
        joined: torch.Tensor = torch.cat(normal, dim=-1)[0].float().cpu()
        return joined
