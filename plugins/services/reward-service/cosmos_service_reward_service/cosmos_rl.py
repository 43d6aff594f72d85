r"""The wire format of cosmos-rl's reward service: bodies and answers, so that its clients can ask this service.

    {"prompts": [...], "reward_fn": {"NAME": 1.0}, "media_type": "image", "video_infos": [{"video_fps": 16.0}]}\n<npy>

Source: `reward_service` of cosmos-rl 0.4.7 (README.md, service and example clients), and what its trainer sends; its
README says that `media_type` is `video` if absent, and its service takes that for `latent`. Deviations: bodies made by
`torch.save` are refused, since they are pickles; images of floats are refused, since their range is not said; a request
that is not known has status 404, one that has expired 410, and one of which a completion has no score 500, where that
service says 400 for ever.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

import attrs
import numpy as np
from attrs import validators as check

from cosmos_core.config import option
from cosmos_core.config.structure import structure
from cosmos_core.data.npy import is_npy, read_npy
from cosmos_core.errors import ConfigError
from cosmos_core.types import JSON, Array, Payload, Prompt
from cosmos_service_reward_service.arrays import rows_of
from cosmos_service_reward_service.bodies import Submission, completion_of, latents_of, media_of, split
from cosmos_service_reward_service.ledger import Entry

PATHS: Final = {"ping": "/api/reward/ping", "enqueue": "/api/reward/enqueue", "pull": "/api/reward/pull"}
_USUAL_FPS: Final = 16.0


@attrs.frozen(kw_only=True)
class ForeignLine:
    """The keys of the JSON that are known here."""

    prompts: tuple[str, ...] = option(help="Of each completion.", validator=check.min_len(1))
    reward_fn: Mapping[str, float] = option(help="Scorers, each with a weight; those of 0 and below are not asked.")
    media_type: str = option(
        "latent", help="image, video or latent.", validator=check.in_(("image", "video", "latent"))
    )
    video_infos: tuple[Mapping[str, JSON], ...] = option((), help="Of each completion, `video_fps`.")


def read_foreign(data: bytes, *, most: int) -> Submission:
    """The submission in a body. Keys that are not known here are metadata of each prompt.

    Args:
        data: The body.
        most: Most completions.

    Raises:
        ValueError: It is none, with what is wrong and where.
    """
    raw, rest = split(data)
    names = [field.name for field in attrs.fields(ForeignLine)]
    if not isinstance(raw, dict):
        raise ValueError(f"the first line of the body is no JSON object: {raw!r:.100}")  # noqa: TRY004 - it is data
    try:
        line = structure({name: raw[name] for name in names if name in raw}, ForeignLine)
    except ConfigError as error:
        raise ValueError(str(error)) from None
    if bytes(rest[:2]) == b"PK":
        raise ValueError("the array is a file of torch.save, which is a pickle; send it as npy")
    if not is_npy(rest):
        raise ValueError("the array is no npy file")
    if len(line.prompts) > most:
        raise ValueError(f"prompts: {len(line.prompts)}, and a request may have {most}")
    array = _typed(read_npy(rest), line)
    payloads = _payloads(rows_of(array, len(line.prompts)), line)
    scorers = tuple(name for name, weight in line.reward_fn.items() if weight > 0.0)
    if not scorers:
        raise ValueError("reward_fn: no scorer with a weight above 0")
    metadata = {name: value for name, value in raw.items() if name not in names}
    return Submission(
        kind=payloads[0].kind,
        scorers=scorers,
        completions=tuple(
            completion_of(Prompt(text=text, metadata=metadata), payload)
            for text, payload in zip(line.prompts, payloads, strict=True)
        ),
        about=_about(array, payloads, line),
    )


def pulled(entry: Entry, scorer: str) -> tuple[dict[str, Any], str]:
    """The answer to a request for the results of one scorer, and why there is none; the other is empty.

    Raises:
        KeyError: The request did not ask this scorer.
    """
    assert entry.results is not None
    row = entry.results[scorer]
    failed = next((each for each in row if each.value is None), None)
    if failed is not None:
        return {}, f"{failed.status.value}: {failed.detail}"
    answer = {
        "scores": {scorer: [each.value for each in row]},
        "input_info": dict(entry.about),
        "duration": f"{entry.seconds:.2f}",
        "decoded_duration": "0.00",
        "type": scorer,
    }
    return answer, ""


def _typed(array: Array, line: ForeignLine) -> Array:
    """The array as it was meant: numpy has no name for bfloat16, which comes as bytes."""
    if line.media_type == "latent" and array.dtype == "uint8" and array.shape and array.shape[-1] % 2 == 0:
        return Array(dtype="bfloat16", shape=(*array.shape[:-1], array.shape[-1] // 2), data=array.data)
    return array


def _payloads(rows: Sequence[Array], line: ForeignLine) -> list[Payload]:
    if line.media_type == "image":
        return [media_of(row, None) for row in rows]
    if line.video_infos and len(line.video_infos) != len(rows):
        raise ValueError(f"video_infos: {len(line.video_infos)} for {len(rows)} videos")
    # Its trainer has sent latents as `video`.
    if line.media_type == "latent" or rows[0].dtype != "uint8":
        return [latents_of(row, _fps(line, index)) for index, row in enumerate(rows)]
    return [_video(row, _fps(line, index)) for index, row in enumerate(rows)]


def _video(row: Array, fps: float) -> Payload:
    """A video [3, T, H, W]."""
    if len(row.shape) != 4 or row.shape[0] != 3:
        raise ValueError(
            f"a row of the array is {row.dtype} {row.shape}; videos are uint8 [videos, 3, frames, height, width]"
        )
    frames = np.ascontiguousarray(np.frombuffer(row.data, np.uint8).reshape(row.shape).transpose(1, 2, 3, 0))
    return media_of(Array(dtype="uint8", shape=frames.shape, data=frames.tobytes()), fps)


def _fps(line: ForeignLine, index: int) -> float:
    info = line.video_infos[index] if line.video_infos else {}
    fps = info.get("video_fps", info.get("fps", _USUAL_FPS))
    if isinstance(fps, bool) or not isinstance(fps, int | float) or not 0 < fps <= sys.float_info.max:
        raise ValueError(f"video_infos.{index}.video_fps: expected a number above 0, got {fps!r:.100}")
    return float(fps)


def _about(array: Array, payloads: Sequence[Payload], line: ForeignLine) -> dict[str, JSON]:
    """The description of the arrays in answers; it is kept with the results, so it is of a bounded size."""
    found = [each.arrays["frames" if each.kind == "media" else "sample"] for each in payloads]
    values = [np.frombuffer(each.data, each.dtype) for each in found]
    about: dict[str, JSON] = {
        "shape": list(array.shape),
        "dtype": f"torch.{array.dtype}",
        "min": f"{min(float(each.min()) for each in values):.3f}",
        "max": f"{max(float(each.max()) for each in values):.3f}",
    }
    is_video = line.media_type == "video" and payloads[0].kind == "media"
    if line.video_infos and is_video:
        about["video_infos"] = [{"video_fps": _fps(line, index)} for index in range(len(payloads))]
    return about
