"""Encoders of Wan: captions through UMT5, images through a CLIP tower. Both are never trained.

Source: `WanPipeline` and `WanImageToVideoPipeline` of diffusers 0.42.
"""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import Any, Final

import torch
from torch.nn import functional
from transformers import AutoTokenizer

from cosmos_core.models.diffusion import Part

try:
    import ftfy  # type: ignore[import-not-found,unused-ignore]
except ImportError:
    ftfy = None


class TextEncoder:
    """UMT5.

    Args:
        part: An UMT5EncoderModel.
        tokenizer: Folder of its tokenizer.
    """

    def __init__(self, part: Part, tokenizer: Path) -> None:
        self._tokenizer: Any = AutoTokenizer.from_pretrained(tokenizer)
        self._part: Final = part

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
        with self._part.used() as (module, device):
            given = found.input_ids.to(device), found.attention_mask.to(device)
            state: torch.Tensor = module(*given).last_hidden_state[0]
        return state[: int(found.attention_mask.sum())].float().cpu()


class ImageEncoder:
    """A CLIP tower and how it wants its images.

    Args:
        part: A CLIPVisionModel.
        processor: Folder of `preprocessor_config.json`.
    """

    def __init__(self, part: Part, processor: Path) -> None:
        self._part: Final = part
        config = json.loads((processor / "preprocessor_config.json").read_text())
        self._mean = torch.tensor(config["image_mean"]).view(3, 1, 1)
        self._std = torch.tensor(config["image_std"]).view(3, 1, 1)

    @torch.no_grad()
    def encode(self, pixels: torch.Tensor) -> torch.Tensor:
        """float32 [tokens, width] of float32 [3, h, w] in [-1, 1]: the last hidden state but one.

        Deviation from the processor of transformers: resized as a tensor, with the same filter.
        """
        with self._part.used() as (module, device):
            cut = self._cut(pixels, module.config.image_size)
            given = ((cut - self._mean) / self._std)[None].to(device)
            found: torch.Tensor = module(given, output_hidden_states=True).hidden_states[-2][0].float().cpu()
        return found

    @staticmethod
    def _cut(pixels: torch.Tensor, side: int) -> torch.Tensor:
        """The middle [3, side, side] of the image, scaled so that its shorter side fits; in [0, 1]."""
        _, height, width = pixels.shape
        scale = side / min(height, width)
        size = max(side, round(height * scale)), max(side, round(width * scale))
        image = functional.interpolate(
            (pixels[None] + 1) / 2, size=size, mode="bicubic", antialias=True, align_corners=False
        )[0].clamp(0, 1)
        top, left = (size[0] - side) // 2, (size[1] - side) // 2
        return image[:, top : top + side, left : left + side]


def cleaned(words: str) -> str:
    """A caption as the model was trained on it: entities and white space made plain.

    Broken encodings are mended too, where ftfy is installed.
    """
    mended = words if ftfy is None else ftfy.fix_text(words)
    return re.sub(r"\s+", " ", html.unescape(html.unescape(mended))).strip()
