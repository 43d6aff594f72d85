"""Positions over time, height and width of the units of a sequence, as transformers' model counts them.

Shape legend: U units of a sequence.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from transformers import MODEL_MAPPING, PretrainedConfig

TEXT, IMAGE, VIDEO = 0, 1, 2


class RopePositions:
    """Positions of M-RoPE (arXiv 2409.12191, section 2.1; 2502.13923 for absolute time).

    Args:
        config: Of the whole model.
    """

    def __init__(self, config: PretrainedConfig) -> None:
        self._model = _without_weights(MODEL_MAPPING[type(config)], config)
        self._takes_seconds = "second_per_grid_ts" in inspect.signature(self._model.get_rope_index).parameters

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
        seconds = {"second_per_grid_ts": torch.tensor([s for s in steps_s if s])} if self._takes_seconds else {}
        positions_3BU, _ = self._model.get_rope_index(
            tokens_U[None],
            mm_token_type_ids=kinds_U[None],
            image_grid_thw=torch.tensor(images) if images else None,
            video_grid_thw=torch.tensor(videos) if videos else None,
            **seconds,
        )
        positions_3U: torch.Tensor = positions_3BU[:, 0]
        return positions_3U


def _without_weights(model_class: Any, config: PretrainedConfig) -> Any:
    """An instance that can count positions, which reads nothing but the config."""
    model = model_class.__new__(model_class)
    torch.nn.Module.__init__(model)
    model.config = config
    return model
