"""Cosmos-Predict2.5 as a model plugin: how its transformer is called, guided and conditioned.

Times enter as they are, one for each latent frame: those that are given have a time of their own, near 0. Guidance is
v + g (v - v_neg), so that 0 is that of the prompt alone. The transformer sees, beside the latents, which frames are
given, and a padding mask, which is 0 everywhere.

Source: Cosmos-Predict2.5 (arXiv:2511.00062), as `Cosmos2_5_PredictBasePipeline` of diffusers 0.42 computes it.
Deviation: the padding mask is made here, where the transformer of diffusers would resize it by torchvision.

Shape legend: B latents, C channels, T latent frames, H and W latent height and width, L tokens, E their width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Final

import torch
from torch import nn

from cosmos_core.errors import ConfigError
from cosmos_core.models.diffusion import GIVEN, IS_GIVEN, DiffusionModel, TokenSlices
from cosmos_core.protocols import ModelContext
from cosmos_core.types import Payload, Prompt
from cosmos_model_cosmos_predict.options import CosmosPredictOptions

if TYPE_CHECKING:
    from cosmos_model_cosmos_predict.encoder import TextEncoder

TEXT_ENCODER: Final = "text_encoder"
TOKENIZER: Final = "tokenizer"
_FOREIGN: Final = ("img_context_dim_in", "controlnet_block_every_n")
_PADDING: Final = "concat_padding_mask"
_PLACES_STD: Final = 0.02


class CosmosPredictModel(DiffusionModel):
    """Text to world, image to world and video to world, by how many frames a row gives."""

    transformer_class: ClassVar[str] = "CosmosTransformer3DModel"
    autoencoder_class: ClassVar[str] = "AutoencoderKLWan"
    layers: ClassVar[str] = "transformer_blocks"
    published: ClassVar[Mapping[str, str]] = {
        f"nvidia/Cosmos-Predict2.5-{size}": "diffusers/base/post-trained" for size in ("2B", "14B")
    }

    options: CosmosPredictOptions

    def __init__(self, options: CosmosPredictOptions, context: ModelContext) -> None:
        super().__init__(options, context)
        self._encoder: TextEncoder | None = None

    @property
    def neutral_guidance(self) -> float:
        """The guidance at which the velocity is that of the prompt alone."""
        return 0.0

    @property
    def default_negative_prompt(self) -> str:
        """The negative prompt of the family's own pipeline."""
        from diffusers.pipelines.cosmos import pipeline_cosmos2_5_predict as pipeline  # noqa: PLC0415 - it takes seconds

        return str(pipeline.DEFAULT_NEGATIVE_PROMPT)

    @property
    def text_width(self) -> int:
        """E."""
        is_projected = self.config["use_crossattn_projection"]
        return int(self.config["crossattn_proj_in_channels" if is_projected else "text_embed_dim"])

    def check(self, config: Mapping[str, Any]) -> None:
        """Refuse transformers of other members of the family."""
        for name in _FOREIGN:
            if config[name]:
                raise ConfigError(f"model: {name} = {config[name]!r} is of another Cosmos model than Predict2.5")
        if config["patch_size"][0] != 1:
            raise ConfigError(
                f"model: patch_size = {config['patch_size']}; each latent frame has a time, so begin with 1"
            )
        if config["in_channels"] != config["out_channels"] + 1:
            raise ConfigError(
                f"model: in_channels = {config['in_channels']}; they are the {config['out_channels']} that are "
                "generated, and one that says which frames are given"
            )

    def most_patches(self, config: Mapping[str, Any]) -> tuple[int, int, int]:
        """Those of `max_size`; rotary places alone have as many of each as the largest."""
        frames, rows, columns = (
            size // part for size, part in zip(config["max_size"], config["patch_size"], strict=True)
        )
        if config["extra_pos_embed_type"]:
            return frames, rows, columns
        most = max(frames, rows, columns)
        return most, most, most

    def make(self, config: Mapping[str, Any]) -> nn.Module:
        """The transformer, which is handed its padding mask as a channel like any other.

        Places that are learned are drawn: at diffusers' zeros, divided by their norm, they have gradients 1e5 times
        those of anything else.
        """
        module: Any = super().make(config)
        module.register_to_config(**{_PADDING: False})
        if config["extra_pos_embed_type"]:
            for parameter in module.learnable_pos_embed.parameters():
                nn.init.normal_(parameter, std=_PLACES_STD)
        made: nn.Module = module
        return made

    def denoise(
        self,
        module: nn.Module,
        latents_B: torch.Tensor,
        times_B: torch.Tensor,
        text_BLE: torch.Tensor,
        conditions: Mapping[str, torch.Tensor],
    ) -> torch.Tensor:
        """One forward of the transformer (see `DiffusionModel.denoise`)."""
        is_given_BT = conditions[IS_GIVEN]
        mask_B = is_given_BT[:, None, :, None, None].to(latents_B.dtype).expand_as(latents_B[:, :1])
        channels = [latents_B, mask_B]
        if self.config[_PADDING]:
            channels.append(torch.zeros_like(mask_B))
        times_BT = torch.where(is_given_BT, self.options.given_time, times_B[:, None])
        velocity_B: torch.Tensor = type(module).forward(
            module,
            hidden_states=torch.cat(channels, dim=1),
            timestep=times_BT[:, None, :, None, None],
            encoder_hidden_states=text_BLE,
            return_dict=False,
        )[0]
        return velocity_B

    def guide(self, velocity_B: torch.Tensor, negative_B: torch.Tensor, guidance: torch.Tensor) -> torch.Tensor:
        """v + g (v - v_neg)."""
        return velocity_B + guidance * (velocity_B - negative_B)

    def spread(self, module: nn.Module, slices: TokenSlices) -> None:
        """Spread tokens over `cp`."""
        from cosmos_model_cosmos_predict.attention import spread  # noqa: PLC0415 - it imports diffusers

        spread(module, slices)

    def condition(self, prompt: Prompt) -> Mapping[str, torch.Tensor]:
        """`given` and `is_given`, where a row gives frames.

        Raises:
            DataError: They cannot be used.
        """
        pixels = self.rows.given_pixels(prompt)
        if pixels is None:
            return {}
        latents = self.codec.encode(pixels)
        given = torch.zeros(self.shape)
        is_given_T = torch.zeros(self.shape[1], dtype=torch.bool)
        given[:, : latents.shape[1]], is_given_T[: latents.shape[1]] = latents, True
        return {GIVEN: given, IS_GIVEN: is_given_T}

    def conditioning(self, payload: Payload) -> Mapping[str, torch.Tensor]:
        """The text, which frames are given, and these."""
        return {IS_GIVEN: torch.zeros(self.shape[1], dtype=torch.bool), **super().conditioning(payload)}

    def encode_words(self, words: str) -> torch.Tensor:
        """The embedding [L, E] of a caption by Qwen2.5-VL; padding is part of it.

        Raises:
            DataError: The checkpoint has no text encoder.
        """
        if self._encoder is None:
            if not self.has(TEXT_ENCODER):
                return super().encode_words(words)  # which raises it
            from transformers import Qwen2_5_VLForConditionalGeneration  # noqa: PLC0415 - most processes encode nothing

            from cosmos_model_cosmos_predict.encoder import TextEncoder  # noqa: PLC0415 - likewise

            part = self.encoder(TEXT_ENCODER, Qwen2_5_VLForConditionalGeneration)
            self._encoder = TextEncoder(part, self.folder / TOKENIZER)
        return self._encoder.encode(words, self.options.text_length)
