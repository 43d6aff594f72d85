"""Frames as they are looked at, and as models compute with them.

Shape legend: F frames, h and w height and width in pixels.
"""

from __future__ import annotations

import torch
from torch.nn import functional


def pixels_of(frames: torch.Tensor) -> torch.Tensor:
    """float32 [3, F, h, w] in [-1, 1], from uint8 [F, h, w, 3]."""
    # Rearranged as bytes, and changed in place: a clip is large.
    return frames.permute(3, 0, 1, 2).contiguous().float().div_(127.5).sub_(1.0)


def frames_of(pixels: torch.Tensor) -> torch.Tensor:
    """uint8 [F, h, w, 3], from [3, F, h, w] in [-1, 1]; what lies outside is clipped."""
    levels = ((pixels.float().clamp(-1.0, 1.0) + 1.0) * 127.5).round()
    return levels.to(torch.uint8).permute(1, 2, 3, 0).contiguous()


def fitted(frames: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Frames scaled until they cover a size, and cut to it around their middle.

    Args:
        frames: uint8 [F, h, w, 3].
        height: Of the result.
        width: Of the result.

    Returns:
        uint8 [F, height, width, 3].
    """
    if frames.shape[1:3] == (height, width):
        return frames
    scale = max(height / frames.shape[1], width / frames.shape[2])
    size = max(height, round(frames.shape[1] * scale)), max(width, round(frames.shape[2] * scale))
    scaled = functional.interpolate(
        frames.permute(0, 3, 1, 2).float(), size=size, mode="bilinear", antialias=True, align_corners=False
    )
    top, left = (size[0] - height) // 2, (size[1] - width) // 2
    cut = scaled[:, :, top : top + height, left : left + width]
    return cut.round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).contiguous()
