"""Ordinary pictures: what a world model shows on its worst days too, and rewards of pictures must have an answer to."""

from __future__ import annotations

import struct

import numpy as np
import numpy.typing as npt

from cosmos_core.protocols import Completion
from cosmos_core.types import JSON, Array, Message, Payload, Prompt

_HEIGHT, _WIDTH = 24, 40
_PROMPT = 'a red ball rolls past a sign that says "GO"'
_CHAT = (Message(role="user", content=_PROMPT),)


def ordinary_pictures() -> tuple[Completion, ...]:
    """Videos that move, stand still, are black, white, noise or of other shapes, of a prompt that names a colour."""
    draw = np.random.default_rng(0)
    noise = draw.integers(0, 256, (3, _HEIGHT, _WIDTH, 3), np.uint8)
    ball = np.zeros((4, _HEIGHT, _WIDTH, 3), np.uint8)
    for index, frame in enumerate(ball):
        frame[8:16, 4 + 6 * index : 12 + 6 * index] = (255, 0, 0)
    return (
        shown_as(ball),
        shown_as(ball[::-1]),
        shown_as(noise),
        shown_as(np.zeros_like(ball)),
        shown_as(np.full_like(ball, 255)),
        shown_as(np.repeat(noise[:1], 9, axis=0)),
        shown_as(noise[:2, :3, :5], truncated=True),
        shown_as(np.zeros((2, 40, 8, 3), np.uint8), chat=True),
    )


def shown_as(frames: npt.NDArray[np.uint8], *, truncated: bool = False, chat: bool = False) -> Completion:
    """A completion that looks like these frames [F, height, width, 3], which a reward could write to."""
    metadata: dict[str, JSON] = {"source": "conformance kit", "tags": ["ball", "kit"]}
    arrays = {
        "frames": Array(dtype="uint8", shape=frames.shape, data=memoryview(bytearray(frames.tobytes()))),
        "fps": Array(dtype="float32", shape=(), data=struct.pack("<f", 8.0)),
    }
    return Completion(
        prompt=Prompt(text=_CHAT if chat else _PROMPT, metadata=metadata),
        text="",
        media=Payload(kind="media", arrays=arrays),
        truncated=truncated,
        num_units=4,
    )
