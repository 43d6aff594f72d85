"""Positions over time, height and width of the units of a sequence, as transformers' model counts them.

Shape legend: U units of a sequence.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import MODEL_MAPPING, PretrainedConfig

from cosmos_core.models.vision.rows import OwnPositions

TEXT, IMAGE, VIDEO = 0, 1, 2


class RopePositions:
    """Positions of M-RoPE (arXiv 2409.12191, section 2.1; 2502.13923 for absolute time).

    Args:
        config: Of the whole model.
    """

    def __init__(self, config: PretrainedConfig) -> None:
        self._own = OwnPositions(MODEL_MAPPING[type(config)], config)

    def of(
        self, tokens_U: torch.Tensor, kinds_U: torch.Tensor, grids: Sequence[Sequence[int]], steps_s: Sequence[float]
    ) -> torch.Tensor:
        """int64 [3, U].

        Args:
            tokens_U: int64, the sequence.
            kinds_U: int64, `TEXT`, `IMAGE` or `VIDEO` of each unit.
            grids: Patches over time, height and width, of each image and video in order.
            steps_s: Seconds of a temporal patch of each; 0 for an image.
        """
        images = [list(grid) for grid, step_s in zip(grids, steps_s, strict=True) if not step_s]
        videos = [list(grid) for grid, step_s in zip(grids, steps_s, strict=True) if step_s]
        return self._own.of(
            tokens_U,
            kinds_U,
            image_grid_thw=torch.tensor(images) if images else None,
            video_grid_thw=torch.tensor(videos) if videos else None,
            second_per_grid_ts=torch.tensor([step_s for step_s in steps_s if step_s]),
        )
