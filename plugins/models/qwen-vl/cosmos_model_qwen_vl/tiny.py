"""Tiny models of both families, and pictures to show them: for tests, in this distribution and elsewhere."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from PIL import Image

TEXT: Final[Mapping[str, Any]] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
}
VISION: Final[Mapping[str, Any]] = {
    "depth": 2,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
QWEN25: Final[Mapping[str, Any]] = {
    "model_type": "qwen2_5_vl",
    "text_config": {
        **TEXT,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
    },
    "vision_config": {
        **VISION,
        "hidden_size": 32,
        "intermediate_size": 48,
        "out_hidden_size": 32,
        "window_size": 16,
        "fullatt_block_indexes": [1],
        "initializer_range": 0.3,
    },
    "tie_word_embeddings": False,
}
QWEN3: Final[Mapping[str, Any]] = {
    "model_type": "qwen3_vl",
    "text_config": {
        **TEXT,
        "head_dim": 8,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]},
    },
    "vision_config": {
        **VISION,
        "hidden_size": 32,
        "intermediate_size": 48,
        "out_hidden_size": 32,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0, 1],
        "initializer_range": 0.3,
    },
    "tie_word_embeddings": True,
}
CONFIGS: Final[Mapping[str, Mapping[str, Any]]] = {"qwen2_5_vl": QWEN25, "qwen3_vl": QWEN3}
OPTIONS: Final[Mapping[str, Any]] = {
    "min_pixels": 64,
    "max_pixels": 1024,
    "video_min_pixels": 64,
    "video_max_pixels": 4096,
    "video_max_frames": 6,
}
TOKENIZER: Final[Mapping[str, Any]] = {"build": "byte-bpe", "vocab_size": 300, "split_digits": True}


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """An image of smooth noise."""
    pixels = np.random.default_rng(seed).integers(0, 255, (4, 5, 3), dtype=np.uint8)
    return Image.fromarray(pixels).resize((width, height), Image.Resampling.BICUBIC)


def data_url(image: Image.Image) -> str:
    """An image as a location of its own."""
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def film(folder: Path, num_frames: int, width: int, height: int) -> str:
    """A new folder of frames, as a location."""
    folder.mkdir(parents=True)
    for number in range(num_frames):
        picture(width, height, seed=number).save(folder / f"{number:03}.png")
    return str(folder)
