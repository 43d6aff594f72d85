"""A model of the CLIP family: one text and some frames to cosines.

Shape suffixes: F frames, C channels, S the model's side in pixels, L tokens, E embedding.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import torch
import transformers
from PIL import Image

from cosmos_reward_vision.frames import Frames

_MEAN: Final = (0.48145466, 0.4578275, 0.40821073)
_STD: Final = (0.26862954, 0.26130258, 0.27577711)
"""Of CLIP's own pictures, where a checkpoint has no preprocessor_config.json."""


class Clip:
    """A checkpoint's model and tokenizer.

    Pictures are prepared here, with Pillow: the shorter side is resized to the model's, the middle cut out, and
    channels normalised, as in the image processor of CLIP without torchvision.

    Args:
        path: Folder or hub name.
        device: As torch names it.
        dtype: As torch names it.

    Raises:
        OSError: There is no such checkpoint.
        ValueError: It is none of the family.
        RuntimeError: There is no such device.
    """

    def __init__(self, path: str, *, device: str, dtype: str) -> None:
        self._device: Final = torch.device(device)
        self._tokenizer: Final[Any] = transformers.AutoTokenizer.from_pretrained(path)
        model, loaded = transformers.AutoModel.from_pretrained(
            path, dtype=getattr(torch, dtype), output_loading_info=True
        )
        config = model.config
        if not all(hasattr(config, part) for part in ("text_config", "vision_config", "projection_dim")):
            raise ValueError(f"it is a {config.model_type}, and has no embeddings of texts and pictures to compare")
        if loaded["missing_keys"]:
            raise ValueError(f"the checkpoint has no weights for {', '.join(sorted(loaded['missing_keys'])[:3])}")
        self._model: Final[Any] = model.to(self._device).eval()
        self._side: Final = int(config.vision_config.image_size)
        self._longest: Final = int(config.text_config.max_position_embeddings)
        mean, std = _normalisation(path)
        self._mean_C: Final = np.array(mean, np.float32)
        self._std_C: Final = np.array(std, np.float32)

    def similarities(self, text: str, frames_FHWC: Frames) -> tuple[list[float], int]:
        """The cosine of each frame with the text, and how many tokens of the text were cut off at the end."""
        num_tokens = len(self._tokenizer(text, verbose=False)["input_ids"])
        tokens = self._tokenizer(text, truncation=True, max_length=self._longest, return_tensors="pt").to(self._device)
        pixels_FCSS = torch.stack([self._prepared(each) for each in frames_FHWC])
        with torch.inference_mode():
            answer = self._model(
                input_ids=tokens["input_ids"],
                attention_mask=tokens["attention_mask"],
                pixel_values=pixels_FCSS.to(self._device, self._model.dtype),
            )
        text_1E, image_FE = answer.text_embeds.float(), answer.image_embeds.float()
        cosines = torch.nn.functional.cosine_similarity(image_FE, text_1E)
        return cosines.tolist(), max(0, num_tokens - self._longest)

    def _prepared(self, frame_HWC: Frames) -> torch.Tensor:
        """float32 [C, S, S]."""
        height, width = frame_HWC.shape[:2]
        # In integers: a float scale makes 503 of 504 pixels, and the cut is another one.
        shorter = min(height, width)
        size = (self._side * width // shorter, self._side * height // shorter)
        picture = Image.fromarray(frame_HWC).resize(size, Image.Resampling.BICUBIC)
        left, top = (size[0] - self._side) // 2, (size[1] - self._side) // 2
        picture = picture.crop((left, top, left + self._side, top + self._side))
        values = (np.asarray(picture, np.float32) / 255.0 - self._mean_C) / self._std_C
        return torch.from_numpy(np.ascontiguousarray(values.transpose(2, 0, 1)))


def _normalisation(path: str) -> tuple[Any, Any]:
    """Mean and standard deviation of channels, as the checkpoint has them."""
    try:
        found, _ = transformers.CLIPImageProcessorPil.get_image_processor_dict(path)
    except OSError:
        return _MEAN, _STD
    return found.get("image_mean", _MEAN), found.get("image_std", _STD)
