"""Patches, placeholders and positions of a prompt's media, for one config and checkpoint."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import attrs
from transformers import PretrainedConfig
from transformers.video_processing_utils import BaseVideoProcessor

from cosmos_core.errors import DataError
from cosmos_core.models.vision.images import IMAGE_MARK, VIDEO_MARK, filled, with_marks
from cosmos_core.types import Prompt
from cosmos_model_qwen_vl.family import FAMILIES, Family, PixelRange
from cosmos_model_qwen_vl.media import Sampling, load
from cosmos_model_qwen_vl.options import QwenVLOptions
from cosmos_model_qwen_vl.patches import NUM_COLOURS, Patcher, Seen, build_processor
from cosmos_model_qwen_vl.rope import RopePositions
from cosmos_model_qwen_vl.row import MediaTokens

VIDEO_FILE: Final = "video_preprocessor_config.json"


@attrs.frozen(kw_only=True, eq=False)
class Vision:
    """Everything between a location and what `pack` needs."""

    patcher: Patcher
    sampling: Sampling
    tokens: MediaTokens
    rope: RopePositions

    @staticmethod
    def of(config: PretrainedConfig, path: str | None, options: QwenVLOptions) -> Vision:
        """For a config, its checkpoint if there is one, and the recipe's options.

        Raises:
            DataError: The checkpoint's image processor cannot be read.
        """
        family, vision = FAMILIES[config.model_type], config.vision_config
        processor = build_processor(path, vision, family, (options.min_pixels, options.max_pixels))
        merged = vision.spatial_merge_size**2
        return Vision(
            patcher=Patcher(processor, family, _video_pixels(path, family, options)),
            sampling=Sampling(
                fps=options.video_fps, max_frames=options.video_max_frames, folder_fps=options.folder_fps
            ),
            tokens=MediaTokens(
                image_id=config.image_token_id,
                video_id=config.video_token_id,
                merged=merged,
                patch_width=NUM_COLOURS * vision.temporal_patch_size * vision.patch_size**2,
            ),
            rope=RopePositions(config),
        )

    def see(self, media: Sequence[str]) -> list[Seen]:
        """The images and videos at these locations, in order.

        Raises:
            DataError: Something cannot be read, or is too long and thin.
        """
        seen = []
        for location in media:
            shown = load(location, self.sampling)
            try:
                seen.append(self.patcher.see(shown))
            except ValueError as error:
                raise DataError(f"media {location[:80]!r}: {error}") from error
        return seen

    def save(self, directory: Path) -> None:
        """Write the image processor, and what of it videos need."""
        processor, pixels = self.patcher.processor, self.patcher.video_pixels
        processor.save_pretrained(directory)
        settings: dict[str, Any] = {
            "video_processor_type": self.patcher.family.video_processor,
            "size": {"shortest_edge": pixels.smallest, "longest_edge": pixels.largest},
            "patch_size": processor.patch_size,
            "temporal_patch_size": processor.temporal_patch_size,
            "merge_size": processor.merge_size,
            "image_mean": list(processor.image_mean),
            "image_std": list(processor.image_std),
            "fps": self.sampling.fps,
        }
        (directory / VIDEO_FILE).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def _video_pixels(path: str | None, family: Family, options: QwenVLOptions) -> PixelRange:
    """The recipe's bounds, else the checkpoint's, else the family's."""
    size: dict[str, int] = {}
    if path is not None:
        try:
            settings, _ = BaseVideoProcessor.get_video_processor_dict(path)
        except (OSError, ValueError):
            settings = {}  # a checkpoint for images alone
        old = {"shortest_edge": settings.get("min_pixels"), "longest_edge": settings.get("max_pixels")}
        size = {name: value for name, value in {**old, **(settings.get("size") or {})}.items() if value}
    return PixelRange(
        smallest=options.video_min_pixels or size.get("shortest_edge", family.video_pixels.smallest),
        largest=options.video_max_pixels or size.get("longest_edge", family.video_pixels.largest),
    )


def place(prompt: Prompt, seen: Sequence[Seen]) -> Prompt:
    """The prompt with its media's placeholders in the text.

    Raises:
        DataError: There are more marks than media, or fewer, or of the other kind.
    """
    if not seen:
        return prompt
    marked = with_marks(prompt, [VIDEO_MARK if each.step_s else IMAGE_MARK for each in seen])
    return filled(marked, [each.text for each in seen])
