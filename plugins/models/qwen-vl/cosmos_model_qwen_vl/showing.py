"""Images and videos of a prompt, one by one, as transformers' own forward takes them.

Shape legend: P units of the prompt, U of these that stand for one image or video, M its patches, W values of one.
"""

from __future__ import annotations

import torch

from cosmos_core.models import values
from cosmos_core.models.tokens import view
from cosmos_core.protocols.vision import Shown
from cosmos_core.types import Payload
from cosmos_model_qwen_vl.rope import TEXT
from cosmos_model_qwen_vl.row import ARRAYS, GRIDS, PATCHES, STEPS, check_seen, kinds_of
from cosmos_model_qwen_vl.vision import Vision


def show(payload: Payload, vision: Vision) -> list[Shown]:
    """Images and videos of a prompt, in the order of their placeholders (see `protocols.vision.VisionModel`).

    Raises:
        DataError: The payload has other patches than its grids and placeholders say.
    """
    if ARRAYS.isdisjoint(payload.arrays):
        return []
    check_seen(payload, 0, vision.tokens)
    grids_n3 = torch.from_numpy(view(payload, GRIDS).copy()).long()
    steps_n = torch.from_numpy(values(payload, STEPS).copy())
    sizes = grids_n3.prod(1).tolist()
    patches = torch.split(torch.from_numpy(view(payload, PATCHES).copy()), sizes)
    is_seen_P = torch.from_numpy(kinds_of(payload, vision.tokens) != TEXT)
    places = torch.split(is_seen_P.nonzero()[:, 0], [size // vision.tokens.merged for size in sizes])
    found = []
    for number, patches_MW in enumerate(patches):
        is_video = bool(steps_n[number] > 0)
        start = int(places[number][0]) - (vision.patcher.family.video_lead if is_video else 0)
        inputs = _inputs(vision, is_video, patches_MW, grids_n3[number : number + 1], steps_n[number : number + 1])
        found.append(
            Shown(
                modality="video" if is_video else "image",
                start=start,
                is_seen_U=is_seen_P[start : int(places[number][-1]) + 1],
                inputs=inputs,
            )
        )
    return found


def _inputs(
    vision: Vision, is_video: bool, patches_MW: torch.Tensor, grid_13: torch.Tensor, step_1: torch.Tensor
) -> dict[str, torch.Tensor]:
    suffix, of = ("_videos", "video") if is_video else ("", "image")
    given = {f"pixel_values{suffix}": vision.patcher.normalise(patches_MW), f"{of}_grid_thw": grid_13}
    if is_video and vision.patcher.family.has_video_time:
        given["second_per_grid_ts"] = step_1
    return given
