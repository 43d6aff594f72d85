"""Wan2.1 as a model plugin: how its transformer is called, guided and conditioned.

Times enter as 0 to 1000. Guidance is v_neg + g (v - v_neg), so that 1 is that of the prompt alone. Of an image to
video model the transformer sees, beside the noisy latents, which frames are given and the latents of a video that holds
them and is grey elsewhere; nothing of what it generates is fixed.

Source: Wan (arXiv:2503.20314), as `WanPipeline` and `WanImageToVideoPipeline` of diffusers 0.42 compute it.

Shape legend: B latents, C channels, T latent frames, H and W latent height and width, L tokens, E their width,
F frames of a video, R frames in a latent frame.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Final

import attrs
import torch
from torch import nn

from cosmos_core.errors import ConfigError, DataError
from cosmos_core.models.diffusion import DiffusionModel, DiffusionOptions, TokenSlices, tensor_of, with_tensors
from cosmos_core.protocols import ModelContext
from cosmos_core.types import Payload, Prompt
from cosmos_model_wan.attention import spread

if TYPE_CHECKING:
    from cosmos_model_wan.encoders import ImageEncoder, TextEncoder

_TIMES: Final = 1000.0
CONDITION: Final = "condition"
IMAGE: Final = "image"
TEXT_ENCODER: Final = "text_encoder"
TOKENIZER: Final = "tokenizer"
IMAGE_ENCODER: Final = "image_encoder"
IMAGE_PROCESSOR: Final = "image_processor"
_IMAGE_TOKENS: Final = 257
"""Of CLIP ViT-H/14, the image encoder of Wan2.1."""


@attrs.frozen(kw_only=True)
class WanOptions(DiffusionOptions):
    """The making of conditionings from rows, and the learning of demonstrations."""


class WanModel(DiffusionModel):
    """Text to video, and image to video where the transformer takes more channels than it gives."""

    transformer_class: ClassVar[str] = "WanTransformer3DModel"
    autoencoder_class: ClassVar[str] = "AutoencoderKLWan"
    layers: ClassVar[str] = "blocks"

    def __init__(self, options: WanOptions, context: ModelContext) -> None:
        super().__init__(options, context)
        self._encoder: TextEncoder | None = None
        self._looker: ImageEncoder | None = None

    @property
    def neutral_guidance(self) -> float:
        """The guidance at which the velocity is that of the prompt alone."""
        return 1.0

    @property
    def text_width(self) -> int:
        """E."""
        return int(self.config["text_dim"])

    @property
    def takes_image(self) -> bool:
        """Tell whether it is an image to video model."""
        return bool(self.config["in_channels"] != self._channels)

    @property
    def _channels(self) -> int:
        return int(self.config["out_channels"] or self.config["in_channels"])

    def denoise(
        self,
        module: nn.Module,
        latents_B: torch.Tensor,
        times_B: torch.Tensor,
        text_BLE: torch.Tensor,
        conditions: Mapping[str, torch.Tensor],
    ) -> torch.Tensor:
        """One forward of the transformer (see `DiffusionModel.denoise`)."""
        if CONDITION in conditions:
            latents_B = torch.cat((latents_B, conditions[CONDITION]), dim=1)
        velocity_B: torch.Tensor = type(module).forward(
            module,
            hidden_states=latents_B,
            timestep=times_B * _TIMES,
            encoder_hidden_states=text_BLE,
            encoder_hidden_states_image=conditions.get(IMAGE),
            return_dict=False,
        )[0]
        return velocity_B

    def guide(self, velocity_B: torch.Tensor, negative_B: torch.Tensor, guidance: torch.Tensor) -> torch.Tensor:
        """v_neg + g (v - v_neg)."""
        return negative_B + guidance * (velocity_B - negative_B)

    def computed(self, config: Mapping[str, Any]) -> Mapping[str, torch.Tensor]:
        """Rotary angles, which no checkpoint has."""
        from diffusers.models.transformers.transformer_wan import WanRotaryPosEmbed  # noqa: PLC0415 - it takes seconds

        rope = WanRotaryPosEmbed(config["attention_head_dim"], config["patch_size"], config["rope_max_seq_len"])
        return {f"rope.{name}": buffer for name, buffer in rope.named_buffers()}

    def most_patches(self, config: Mapping[str, Any]) -> tuple[int, int, int]:
        """Those of `rope_max_seq_len`, of each."""
        most = int(config["rope_max_seq_len"])
        return most, most, most

    def spread(self, module: nn.Module, slices: TokenSlices) -> None:
        """Spread tokens over `cp`."""
        spread(module, slices)

    def condition(self, prompt: Prompt) -> Mapping[str, torch.Tensor]:
        """Make the inputs of image to video: `condition` [R + C, T, H, W], and `image` if the transformer sees one.

        Raises:
            DataError: There is an image where none is taken, or none where one is needed.
        """
        if not self.takes_image:
            return super().condition(prompt)
        pixels = self.rows.given_pixels(prompt)
        if pixels is None:
            raise DataError(
                "an image to video model needs an image: the row has neither media nor num_given_frames; give it media "
                "(cosmos generate --image FILE)"
            )
        found = {CONDITION: self._condition(pixels)}
        if self.config["image_dim"] is not None:
            found[IMAGE] = self.encode_image(pixels[:, 0])
        return found

    def blank(self) -> Payload:
        """Zeros for what `conditioning` takes."""
        found = {CONDITION: torch.zeros(self._condition_shape)} if self.takes_image else {}
        if self.takes_image and self.config["image_dim"] is not None:
            found[IMAGE] = torch.zeros(_IMAGE_TOKENS, self.config["image_dim"])
        return with_tensors(super().blank(), found)

    @property
    def _condition_shape(self) -> tuple[int, int, int, int]:
        return int(self.config["in_channels"]) - self._channels, *self.shape[1:]

    def conditioning(self, payload: Payload) -> Mapping[str, torch.Tensor]:
        """The text, and what `condition` gave."""
        found = dict(super().conditioning(payload))
        if self.takes_image:
            found[CONDITION] = tensor_of(payload, CONDITION, torch.float32, self._condition_shape)
            if self.config["image_dim"] is not None:
                found[IMAGE] = tensor_of(payload, IMAGE, torch.float32, (None, self.config["image_dim"]))
        return found

    def encode_words(self, words: str) -> torch.Tensor:
        """The embedding [L, E] of a caption by UMT5, padding left out.

        Raises:
            DataError: The checkpoint has no text encoder.
        """
        if self._encoder is None:
            if not self.has(TEXT_ENCODER):
                return super().encode_words(words)  # which raises it
            from transformers.models.umt5.modeling_umt5 import UMT5EncoderModel  # noqa: PLC0415 - most encode nothing

            from cosmos_model_wan.encoders import TextEncoder  # noqa: PLC0415 - likewise

            self._encoder = TextEncoder(self.encoder(TEXT_ENCODER, UMT5EncoderModel), self.folder / TOKENIZER)
        return self._encoder.encode(words, self.options.text_length)

    def encode_image(self, pixels: torch.Tensor) -> torch.Tensor:
        """The embedding [tokens, width] of an image, float32 [3, h, w] in [-1, 1], by the checkpoint's encoder.

        Raises:
            DataError: The checkpoint has none.
        """
        if self._looker is None:
            if not self.has(IMAGE_ENCODER):
                raise DataError("the transformer attends to images, and the model has no image encoder (model.path)")
            from transformers.models.clip.modeling_clip import CLIPVisionModel  # noqa: PLC0415 - likewise

            from cosmos_model_wan.encoders import ImageEncoder  # noqa: PLC0415 - likewise

            self._looker = ImageEncoder(self.encoder(IMAGE_ENCODER, CLIPVisionModel), self.folder / IMAGE_PROCESSOR)
        return self._looker.encode(pixels)

    def _condition(self, pixels: torch.Tensor) -> torch.Tensor:
        codec, (channels, frames, height, width) = self.codec, self.shape
        number, given = self.options.num_frames, pixels.shape[1]
        expected = codec.temporal + channels
        if int(self.config["in_channels"]) - self._channels != expected:
            raise ConfigError(
                f"model: in_channels = {self.config['in_channels']} with {self._channels} channels generated leaves "
                f"{self.config['in_channels'] - self._channels} for the image, which takes {expected}"
            )
        video = nn.functional.pad(pixels, (0, 0, 0, 0, 0, number - given))
        is_given_F = torch.zeros(number)
        is_given_F[:given] = 1.0
        # The first latent frame is of one frame, which counts as often as those of another do.
        first_R = is_given_F[:1].expand(codec.temporal)
        is_given_RT = torch.cat((first_R, is_given_F[1:])).view(frames, codec.temporal).T
        mask = is_given_RT[:, :, None, None].expand(-1, -1, height, width)
        return torch.cat((mask, codec.encode(video)))
