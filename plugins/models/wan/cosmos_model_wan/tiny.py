"""Tiny models of the family: one whose latents are pixels, for a CPU, and whole pipelines for tests."""

from __future__ import annotations

from typing import Any, Final

import diffusers
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import CLIPVisionConfig, CLIPVisionModel, PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

_DIFFUSERS: Final[Any] = diffusers

CONFIG: Final[dict[str, Any]] = {
    "patch_size": [1, 2, 2],
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "in_channels": 3,
    "out_channels": 3,
    "text_dim": 16,
    "freq_dim": 32,
    "ffn_dim": 48,
    "num_layers": 2,
    "rope_max_seq_len": 32,
}
OPTIONS: Final[dict[str, Any]] = {
    "height": 8,
    "width": 8,
    "num_frames": 4,
    "fps": 8.0,
    "text": "table",
    "text_length": 4,
}
IMAGE_WIDTH: Final = 32
"""Of what the tower of `pipeline` says of an image."""

_SPECIAL: Final = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
_WORDS: Final = ("<pad>", "</s>", "<unk>", "a", "red", "blue", "green", "video", "of", "something")


def pipeline(**changes: Any) -> Any:
    """A pipeline with random weights whose autoencoder has 4 channels: it makes videos of 16 by 16 pixels.

    Args:
        changes: To the transformer's config; with more `in_channels` it is an image to video pipeline.
    """
    config = {**CONFIG, "in_channels": 4, "out_channels": 4, **changes}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        parts: dict[str, Any] = {
            "tokenizer": _tokenizer(),
            "text_encoder": UMT5EncoderModel(_umt5()).eval(),
            "vae": _autoencoder(),
            "scheduler": _DIFFUSERS.FlowMatchEulerDiscreteScheduler(shift=3.0),
            "transformer": _DIFFUSERS.WanTransformer3DModel(**config).eval(),
        }
        if config["in_channels"] == config["out_channels"]:
            return _DIFFUSERS.WanPipeline(**parts)
        if config.get("image_dim"):
            parts["image_encoder"] = CLIPVisionModel(_clip()).eval()
            parts["image_processor"] = CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size=16)
        return _DIFFUSERS.WanImageToVideoPipeline(**parts)


def _autoencoder() -> Any:
    return _DIFFUSERS.AutoencoderKLWan(
        base_dim=4,
        z_dim=4,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
        latents_mean=[0.1, -0.2, 0.3, 0.0],
        latents_std=[0.5, 2.0, 1.5, 0.8],
    ).eval()


def _tokenizer() -> Any:
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(_WORDS)}, unk_token=_SPECIAL["unk_token"]))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, **_SPECIAL)


def _umt5() -> Any:
    return UMT5Config(
        vocab_size=len(_WORDS), d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, pad_token_id=0, eos_token_id=1
    )


def _clip() -> Any:
    return CLIPVisionConfig(
        hidden_size=IMAGE_WIDTH,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=16,
        patch_size=8,
    )
