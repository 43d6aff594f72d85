"""What Wan conditions on besides noise: captions through UMT5, images through a CLIP tower. Both are never trained.

Source: `WanPipeline` and `WanImageToVideoPipeline` of diffusers 0.42.
"""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from transformers import AutoTokenizer
from transformers.models.clip.modeling_clip import CLIPVisionModel
from transformers.models.umt5.modeling_umt5 import UMT5EncoderModel

from cosmos_core.policy.modeling.diffusion import load_frozen

try:
    import ftfy  # type: ignore[import-not-found,unused-ignore]
except ImportError:
    ftfy = None


class TextEncoder:
    """UMT5, loaded when it is made.

    Args:
        folder: Of its weights.
        tokenizer: Of its tokenizer.
    """

    def __init__(self, folder: Path, tokenizer: Path) -> None:
        self._tokenizer: Any = AutoTokenizer.from_pretrained(tokenizer)
        self._module: Any = load_frozen(UMT5EncoderModel, folder)

    @torch.no_grad()
    def encode(self, words: str, length: int) -> torch.Tensor:
        """float32 [tokens, width]; what is longer than the length is cut off, as the family's pipeline does it."""
        found = self._tokenizer(
            [cleaned(words)],
            padding="max_length",
            max_length=length,
            truncation=True,
            add_special_tokens=True,
            return_attention_mask=True,
            return_tensors="pt",
        )
        state: torch.Tensor = self._module(found.input_ids, found.attention_mask).last_hidden_state[0]
        return state[: int(found.attention_mask.sum())].float()


class ImageEncoder:
    """A CLIP tower and how it wants its images, loaded when it is made.

    Args:
        folder: Of its weights.
        processor: Of `preprocessor_config.json`.
    """

    def __init__(self, folder: Path, processor: Path) -> None:
        self._module: Any = load_frozen(CLIPVisionModel, folder)
        config = json.loads((processor / "preprocessor_config.json").read_text())
        self._size: int = self._module.config.image_size
        self._mean = torch.tensor(config["image_mean"]).view(3, 1, 1)
        self._std = torch.tensor(config["image_std"]).view(3, 1, 1)

    @torch.no_grad()
    def encode(self, pixels: torch.Tensor) -> torch.Tensor:
        """float32 [tokens, width] of float32 [3, h, w] in [-1, 1]: the last hidden state but one.

        Deviation from the processor of transformers: resized as a tensor, with the same filter.
        """
        _, height, width = pixels.shape
        scale = self._size / min(height, width)
        size = max(self._size, round(height * scale)), max(self._size, round(width * scale))
        image = functional.interpolate(
            (pixels[None] + 1) / 2, size=size, mode="bicubic", antialias=True, align_corners=False
        )[0].clamp(0, 1)
        top, left = (size[0] - self._size) // 2, (size[1] - self._size) // 2
        cut = image[:, top : top + self._size, left : left + self._size]
        states = self._module(((cut - self._mean) / self._std)[None], output_hidden_states=True).hidden_states
        found: torch.Tensor = states[-2][0].float()
        return found


def cleaned(words: str) -> str:
    """A caption as the model was trained on it: entities and white space made plain.

    Broken encodings are mended too, where ftfy is installed.
    """
    mended = words if ftfy is None else ftfy.fix_text(words)
    return re.sub(r"\s+", " ", html.unescape(html.unescape(mended))).strip()
