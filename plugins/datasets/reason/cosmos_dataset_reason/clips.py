"""Clips of a ball that moves, drawn: what there is to see, and the questions about it.

A clip is an animated GIF in a `data:` URL: a few frames of a ball in one of four colours that moves in one of four
directions.
"""

from __future__ import annotations

import base64
import io
import random
from collections.abc import Mapping
from typing import Final

import attrs
from PIL import Image, ImageDraw

from cosmos_core.data import is_held_out

HELDOUT_SHARE: Final = 0.2
"""Share of all clips that only the held-out split contains."""
SIZE: Final = 32
"""Width and height of a frame in pixels."""
FRAMES: Final = 4
FRAME_MS: Final = 500

COLOURS: Final[Mapping[str, tuple[int, int, int]]] = {
    "red": (220, 40, 40),
    "green": (40, 160, 60),
    "blue": (50, 80, 220),
    "yellow": (235, 205, 40),
}
DIRECTIONS: Final[Mapping[str, tuple[int, int]]] = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}
"""The change of x and y, in pixels that are counted from the left and from the top."""
OPPOSITE: Final[Mapping[str, str]] = {"left": "right", "right": "left", "up": "down", "down": "up"}
BACKGROUND: Final = (120, 120, 120)


@attrs.frozen(kw_only=True)
class Clip:
    """A ball that moves: where it is in the middle of the clip, its radius, and how far it moves a frame, in pixels."""

    colour: str
    direction: str
    x: int
    y: int
    radius: int
    speed: int

    @property
    def is_heldout(self) -> bool:
        """True if it is held out, by a hash of it: the same in every run."""
        return is_held_out(":".join(map(str, attrs.astuple(self))), HELDOUT_SHARE)

    def frames(self) -> list[Image.Image]:
        """The frames, in order."""
        right, down = DIRECTIONS[self.direction]
        found = []
        for number in range(FRAMES):
            way = self.speed * (number - (FRAMES - 1) / 2)
            x, y = self.x + right * way, self.y + down * way
            image = Image.new("RGB", (SIZE, SIZE), BACKGROUND)
            box = (x - self.radius, y - self.radius, x + self.radius, y + self.radius)
            ImageDraw.Draw(image).ellipse(box, fill=COLOURS[self.colour])
            found.append(image)
        return found


def draw_clip(rng: random.Random, *, heldout: bool) -> Clip:
    """Draw a clip of one split; the ball is wholly in each frame."""
    while True:
        radius, speed = rng.randint(5, 6), rng.randint(4, 5)
        room = radius + speed * (FRAMES - 1) // 2 + 1
        clip = Clip(
            colour=rng.choice(tuple(COLOURS)),
            direction=rng.choice(tuple(DIRECTIONS)),
            x=rng.randint(room, SIZE - 1 - room),
            y=rng.randint(room, SIZE - 1 - room),
            radius=radius,
            speed=speed,
        )
        if clip.is_heldout == heldout:
            return clip


def data_url(frames: list[Image.Image]) -> str:
    """An animated GIF of some frames, as a location of its own."""
    buffer = io.BytesIO()
    frames[0].save(buffer, format="GIF", save_all=True, append_images=frames[1:], duration=FRAME_MS, loop=0)
    return f"data:image/gif;base64,{base64.b64encode(buffer.getvalue()).decode()}"
