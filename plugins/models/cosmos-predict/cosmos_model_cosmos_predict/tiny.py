"""Tiny models of the family: one whose latents are pixels, for a CPU, and whole pipelines for tests."""

from __future__ import annotations

from typing import Any, Final

import diffusers
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

_DIFFUSERS: Final[Any] = diffusers

CONFIG: Final[dict[str, Any]] = {
    "in_channels": 4,
    "out_channels": 3,
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "num_layers": 2,
    "mlp_ratio": 2.0,
    "text_embed_dim": 16,
    "adaln_lora_dim": 4,
    "max_size": [8, 32, 32],
    "patch_size": [1, 2, 2],
    "rope_scale": [1.0, 1.0, 1.0],
    "concat_padding_mask": False,
    # None, as in Predict2.5; the class's own default is learned.
    "extra_pos_embed_type": "",
}
OPTIONS: Final[dict[str, Any]] = {
    "height": 8,
    "width": 8,
    "num_frames": 4,
    "fps": 8.0,
    "text": "table",
    "text_length": 4,
}

_ENCODED: Final = {
    "use_crossattn_projection": True,
    "crossattn_proj_in_channels": 32,
    "encoder_hidden_states_channels": 16,
}
_SPECIAL: Final = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
_WORDS: Final = ("<pad>", "</s>", "<unk>", "a", "red", "blue", "green", "video", "of", "something")
_TEMPLATE: Final = "{% for turn in messages %}{{ turn.content[0].text }} </s> {% endfor %}"


class Unguarded:
    """Stands where the pipeline wants a safety checker; it passes everything."""

    device: torch.device = torch.device("cpu")
    dtype: torch.dtype = torch.float32

    def to(self, *_: object, **__: object) -> Unguarded:
        """The same."""
        return self

    def check_text_safety(self, _: str) -> bool:
        """Yes."""
        return True

    def check_video_safety(self, frames: Any) -> Any:
        """The frames."""
        return frames


def pipeline(**changes: Any) -> Any:
    """A pipeline with random weights whose autoencoder has 4 channels: it makes videos of 16 by 16 pixels.

    Args:
        changes: To the transformer's config.
    """
    config = {**CONFIG, **_ENCODED, "in_channels": 5, "out_channels": 4, **changes}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        encoder: Any = Qwen2_5_VLForConditionalGeneration
        return _DIFFUSERS.Cosmos2_5_PredictBasePipeline(
            tokenizer=_tokenizer(),
            text_encoder=encoder(_qwen()).eval(),
            vae=_autoencoder(),
            scheduler=_DIFFUSERS.UniPCMultistepScheduler(
                use_karras_sigmas=True,
                use_flow_sigmas=True,
                prediction_type="flow_prediction",
                sigma_max=200.0,
                sigma_min=0.01,
            ),
            transformer=_DIFFUSERS.CosmosTransformer3DModel(**config).eval(),
            safety_checker=Unguarded(),
        )


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
    return PreTrainedTokenizerFast(tokenizer_object=words, **_SPECIAL, chat_template=_TEMPLATE)


def _qwen() -> Any:
    return Qwen2_5_VLConfig(
        text_config={
            "vocab_size": len(_WORDS),
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0},
        },
        vision_config={
            "depth": 1,
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_heads": 2,
            "out_hidden_size": 16,
            "fullatt_block_indexes": [0],
        },
    )
