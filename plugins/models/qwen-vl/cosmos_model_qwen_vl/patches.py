"""The patches of images and videos that the vision tower takes.

Patches stay bytes until they are where the tower is: a quarter of the memory and of what is moved. Rescaling and
normalising are left for then (`normalise`).

Shape legend: M patches, W values of one (channels x temporal x height x width),
F frames, C colours.
"""

from __future__ import annotations

from typing import Any, Final

import attrs
import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from cosmos_core.errors import DataError
from cosmos_model_qwen_vl.family import Family, PixelRange, image_text
from cosmos_model_qwen_vl.media import Still, Video

NUM_COLOURS: Final = 3


@attrs.frozen(kw_only=True, eq=False)
class Seen:
    """One image or video as the model sees it.

    Attributes:
        patches_MW: uint8.
        grid: Patches over time, height and width; their product is M.
        step_s: Seconds that a temporal patch of a video lasts; 0 for an image.
        text: Its placeholders, as they stand in the prompt.
    """

    patches_MW: npt.NDArray[np.uint8]
    grid: tuple[int, int, int]
    step_s: float
    text: str


class Patcher:
    """Cuts images and videos into patches.

    Args:
        processor: transformers' processor of images, in its variant without torchvision.
        family: What is particular.
        video_pixels: Bounds of the size of videos.
    """

    def __init__(self, processor: Qwen2VLImageProcessorPil, family: Family, video_pixels: PixelRange) -> None:
        self.processor = processor
        self.family = family
        self.video_pixels = video_pixels

    def see(self, shown: Still | Video) -> Seen:
        """Cut one image or video.

        Raises:
            ValueError: It is too long and thin.
        """
        return self._image(shown) if isinstance(shown, Still) else self._video(shown)

    def normalise(self, patches_MW: torch.Tensor) -> torch.Tensor:
        """float32 [M, W] of uint8 patches, on their device."""
        processor = self.processor
        mean_C1, std_C1 = (
            torch.tensor(values, device=patches_MW.device)[:, None]
            for values in (processor.image_mean, processor.image_std)
        )
        colours_MCX = patches_MW.reshape(len(patches_MW), NUM_COLOURS, -1).float() * float(processor.rescale_factor)
        normal_MCX: torch.Tensor = (colours_MCX - mean_C1) / std_C1
        return normal_MCX.flatten(1)

    def _image(self, still: Still) -> Seen:
        made = self.processor.preprocess([still.image], do_rescale=False, do_normalize=False, return_tensors="np")
        _, height, width = (int(size) for size in made["image_grid_thw"][0])
        return Seen(
            patches_MW=made["pixel_values"].astype(np.uint8),
            grid=(1, height, width),
            step_s=0.0,
            text=image_text(self._merged(height, width)),
        )

    def _video(self, video: Video) -> Seen:
        depth: int = self.processor.temporal_patch_size
        missing = -len(video.frames) % depth
        frames = [*video.frames, *[video.frames[-1]] * missing]
        times_s = [*video.times_s, *[video.times_s[-1]] * missing]
        width, height = frames[0].size
        factor = self.processor.patch_size * self.processor.merge_size
        height, width = self.family.frame_size(len(frames), height, width, factor, self.video_pixels)
        resized = [frame.resize((width, height), Image.Resampling(self.processor.resample)) for frame in frames]
        patches_MW, grid = _cut(np.stack([np.asarray(frame) for frame in resized]), self.processor)
        middles_s = [(times_s[i] + times_s[i + depth - 1]) / 2 for i in range(0, len(times_s), depth)]
        return Seen(
            patches_MW=patches_MW,
            grid=grid,
            step_s=depth / video.fps,
            text=self.family.video_text(middles_s, self._merged(grid[1], grid[2])),
        )

    def _merged(self, height: int, width: int) -> int:
        return height * width // int(self.processor.merge_size) ** 2


def _cut(frames_FHWC: npt.NDArray[np.uint8], processor: Any) -> tuple[npt.NDArray[np.uint8], tuple[int, int, int]]:
    """Patches of frames, the patches that will be merged side by side."""
    size, merge, depth = processor.patch_size, processor.merge_size, processor.temporal_patch_size
    num_frames, height, width, colours = frames_FHWC.shape
    steps, rows, columns = num_frames // depth, height // size, width // size
    blocks = frames_FHWC.reshape(steps, depth, rows // merge, merge, size, columns // merge, merge, size, colours)
    patches = blocks.transpose(0, 2, 5, 3, 6, 8, 1, 4, 7).reshape(steps * rows * columns, -1)
    return np.ascontiguousarray(patches), (steps, rows, columns)


def build_processor(
    path: str | None, vision: Any, family: Family, pixels: tuple[int | None, int | None]
) -> Qwen2VLImageProcessorPil:
    """The processor of images: the checkpoint's, or one that fits the config of the vision tower.

    Args:
        path: The checkpoint; None without one.
        vision: The config's `vision_config`.
        family: What is particular.
        pixels: Fewest and most of an image; None leaves the checkpoint's or the library's.

    Raises:
        DataError: The checkpoint's processor cannot be read.
    """
    if path is None:
        processor = Qwen2VLImageProcessorPil(
            patch_size=vision.patch_size,
            temporal_patch_size=vision.temporal_patch_size,
            merge_size=vision.spatial_merge_size,
            image_mean=list(family.mean),
            image_std=list(family.std),
        )
    else:
        try:
            processor = Qwen2VLImageProcessorPil.from_pretrained(path)
        except (OSError, ValueError, TypeError) as error:
            raise DataError(f"model.path: no usable image processor at {path!r}: {error}") from error
    for name, bound in zip(("shortest_edge", "longest_edge"), pixels, strict=True):
        if bound is not None:
            processor.size[name] = bound
    return processor
