"""One shape: what it is, and its picture."""

from __future__ import annotations

import base64
import io
import random
from collections.abc import Callable, Mapping
from typing import Final

import attrs
from PIL import Image, ImageDraw

from cosmos_core.data import is_held_out

HELDOUT_SHARE: Final = 0.2
"""Share of the ways to draw a shape that only the held-out split contains."""

COLOURS: Final[Mapping[str, tuple[int, int, int]]] = {
    "red": (220, 40, 40),
    "green": (40, 160, 60),
    "blue": (50, 80, 220),
    "yellow": (235, 205, 40),
}
BACKGROUND: Final = (245, 245, 245)
STEPS: Final = 8
"""Places along each dim, and sizes, are multiples of 1/8 of the picture."""

_Draw = Callable[[ImageDraw.ImageDraw, tuple[float, float, float, float], tuple[int, int, int]], None]


def _circle(draw: ImageDraw.ImageDraw, box: tuple[float, float, float, float], colour: tuple[int, int, int]) -> None:
    draw.ellipse(box, fill=colour)


def _square(draw: ImageDraw.ImageDraw, box: tuple[float, float, float, float], colour: tuple[int, int, int]) -> None:
    draw.rectangle(box, fill=colour)


def _triangle(draw: ImageDraw.ImageDraw, box: tuple[float, float, float, float], colour: tuple[int, int, int]) -> None:
    left, top, right, bottom = box
    draw.polygon([((left + right) / 2, top), (right, bottom), (left, bottom)], fill=colour)


KINDS: Final[Mapping[str, _Draw]] = {"circle": _circle, "square": _square, "triangle": _triangle}


@attrs.frozen(kw_only=True)
class Drawing:
    """A shape of a kind and colour; place and size in eighths of the picture."""

    kind: str
    colour: str
    left: int
    top: int
    size: int

    @property
    def is_heldout(self) -> bool:
        """True if it is held out, by a hash of it: the same in every run."""
        key = f"{self.kind}:{self.colour}:{self.left}:{self.top}:{self.size}"
        return is_held_out(key, HELDOUT_SHARE)

    def picture(self, image_size: int) -> Image.Image:
        """The picture, square."""
        step = image_size / STEPS
        left, top, size = self.left * step, self.top * step, self.size * step
        image = Image.new("RGB", (image_size, image_size), BACKGROUND)
        KINDS[self.kind](ImageDraw.Draw(image), (left, top, left + size - 1, top + size - 1), COLOURS[self.colour])
        return image


def draw_shape(rng: random.Random, *, heldout: bool) -> Drawing:
    """Draw a shape of one split; it is wholly in the picture."""
    while True:
        size = rng.randint(3, 6)
        drawing = Drawing(
            kind=rng.choice(tuple(KINDS)),
            colour=rng.choice(tuple(COLOURS)),
            left=rng.randint(0, STEPS - size),
            top=rng.randint(0, STEPS - size),
            size=size,
        )
        if drawing.is_heldout == heldout:
            return drawing


def data_url(image: Image.Image) -> str:
    """An image as a location of its own."""
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
