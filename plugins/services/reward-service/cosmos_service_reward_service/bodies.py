r"""The body of a request: one line of JSON, then arrays as npy or safetensors.

    {"version": 1, "kind": "media", "scorers": ["colour"], "completions": [{"prompt": "red", "fps": 8.0}]}\n<arrays>

npy has one array, its first dim the completions: `media` is uint8 [B, F, height, width, 3], of images [B, height,
width, 3]; `latents` are float16 or float32 [B, C, T, H, W]. safetensors has one array a completion, named by its place
(`0`, `1`, ...), each without the first dim and of a shape of its own.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any, Final, Literal, NoReturn

import attrs
from attrs import validators as check

from cosmos_core.config import option
from cosmos_core.config.structure import structure
from cosmos_core.data.npy import is_npy, read_npy
from cosmos_core.errors import ConfigError
from cosmos_core.protocols import Completion
from cosmos_core.types import JSON, Array, Message, Payload, Prompt
from cosmos_service_reward_service.arrays import as_float32, read_safetensors, rows_of

VERSION: Final = 1
_LONGEST_LINE: Final = 1 << 22
_FLOATS: Final = frozenset({"float16", "bfloat16", "float32"})


@attrs.frozen(kw_only=True)
class Described:
    """A completion, as the JSON describes it."""

    prompt: str | tuple[Message, ...] = option(help="The prompt, a text or the turns of a chat.")
    reference: JSON = option(None, help="The row's reference.")
    metadata: Mapping[str, JSON] = option(factory=dict, help="The row's metadata.")
    fps: float | None = option(None, help="Frames of a second of a video.", validator=check.optional(check.gt(0.0)))


@attrs.frozen(kw_only=True)
class Line:
    """The JSON of a body."""

    version: int = option(help="Of this format.", validator=check.in_((VERSION,)))
    kind: Literal["media", "latents"] = option(help="What the arrays are.")
    scorers: tuple[str, ...] = option(help="Who is asked.", validator=check.min_len(1))
    completions: tuple[Described, ...] = option(help="What is scored.", validator=check.min_len(1))


@attrs.frozen(kw_only=True, eq=False)
class Submission:
    """Completions to be scored, and their scorers.

    Attributes:
        kind: Kind of payload: `media` or `latents`.
        scorers: Names, each once.
        completions: As rewards see them.
        about: What the answer says of the arrays, where the format has that.
    """

    kind: str
    scorers: tuple[str, ...]
    completions: tuple[Completion, ...]
    about: Mapping[str, JSON] = attrs.field(factory=dict)

    @property
    def size_bytes(self) -> int:
        """The size of all arrays."""
        payloads = (each.payload or each.media for each in self.completions)
        return sum(array.nbytes for each in payloads if each is not None for array in each.arrays.values())


def split(data: bytes) -> tuple[Any, memoryview]:
    """The JSON of a body's first line, and the rest.

    Raises:
        ValueError: The line has no end, or is no JSON.
    """
    end = data.find(b"\n", 0, _LONGEST_LINE)
    if end < 0:
        raise ValueError(f"the body has no line of JSON: no newline within {min(len(data), _LONGEST_LINE)} bytes")
    try:
        return json.loads(data[:end], parse_constant=_refuse), memoryview(data)[end + 1 :]
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the first line of the body is no JSON: {error}") from None


def read_body(data: bytes, *, most: int) -> Submission:
    """The submission in a body.

    Args:
        data: The body.
        most: Most completions.

    Raises:
        ValueError: It is none, with what is wrong and where.
    """
    raw, rest = split(data)
    try:
        line = structure(raw, Line)
    except ConfigError as error:
        raise ValueError(str(error)) from None
    number = len(line.completions)
    if number > most:
        raise ValueError(f"completions: {number}, and a request may have {most}")
    make = media_of if line.kind == "media" else latents_of
    payloads = []
    for index, (array, each) in enumerate(zip(_arrays(rest, number), line.completions, strict=True)):
        try:
            payloads.append(make(array, each.fps))
        except ValueError as error:
            raise ValueError(f"completions.{index}: {error}") from None
    return Submission(
        kind=line.kind,
        scorers=tuple(dict.fromkeys(line.scorers)),
        completions=tuple(
            completion_of(Prompt(text=each.prompt, reference=each.reference, metadata=each.metadata), payload)
            for each, payload in zip(line.completions, payloads, strict=True)
        ),
    )


def completion_of(prompt: Prompt, payload: Payload) -> Completion:
    """A completion, as rewards see it."""
    if payload.kind == "media":
        return Completion(prompt=prompt, text="", media=payload)
    return Completion(prompt=prompt, text="", payload=payload)


def media_of(frames: Array, fps: float | None) -> Payload:
    """A payload of frames [F, height, width, 3], or of one image [height, width, 3].

    Raises:
        ValueError: They are no frames, or of a video without `fps`.
    """
    shape = frames.shape if len(frames.shape) == 4 else (1, *frames.shape)
    if frames.dtype != "uint8" or len(shape) != 4 or shape[3] != 3 or 0 in shape:
        raise ValueError(
            f"the array is {frames.dtype} {frames.shape}; frames are uint8 [frames, height, width, 3] in 0 to 255"
        )
    if fps is None and shape[0] > 1:
        raise ValueError(f"fps: required for a video, and this one has {shape[0]} frames")
    rate = _rate(1.0 if fps is None else fps)
    return Payload(kind="media", arrays={"frames": Array(dtype="uint8", shape=shape, data=frames.data), "fps": rate})


def latents_of(sample: Array, fps: float | None) -> Payload:
    """A payload of latents [C, T, H, W], as float32; its `fps` is there if it is known.

    Raises:
        ValueError: They are none.
    """
    if sample.dtype not in _FLOATS or len(sample.shape) != 4 or 0 in sample.shape:
        raise ValueError(
            f"the array is {sample.dtype} {sample.shape}; latents are float16, bfloat16 or float32 "
            "[channels, frames, height, width]"
        )
    rate = {} if fps is None else {"fps": _rate(fps)}
    return Payload(kind="latents", arrays={"sample": as_float32(sample), **rate})


def _rate(fps: float) -> Array:
    try:
        return Array(dtype="float32", shape=(), data=struct.pack("<f", fps))
    except OverflowError:
        raise ValueError(f"fps: {fps!r} is more than a float32 holds") from None


def _arrays(data: memoryview, number: int) -> list[Array]:
    """One array a completion."""
    if is_npy(data):
        return rows_of(read_npy(data), number)
    named = read_safetensors(data)
    wanted = [str(index) for index in range(number)]
    if named.keys() != set(wanted):
        raise ValueError(
            f"the safetensors file has arrays {', '.join(sorted(named)) or 'none'}; one for each completion is named "
            f"{', '.join(wanted)}"
        )
    return [named[name] for name in wanted]


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is none")
