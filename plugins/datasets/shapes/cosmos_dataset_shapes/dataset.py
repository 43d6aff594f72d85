"""Rows that are drawn when they are asked for."""

from __future__ import annotations

import random
from typing import Final

import attrs
from attrs import validators as check

from cosmos_core.config import option
from cosmos_core.protocols import DatasetContext, Split
from cosmos_core.types import Message, Prompt
from cosmos_dataset_shapes.drawing import Drawing, data_url, draw_shape

COLOUR_QUESTIONS: Final = ("Which colour is the shape?", "What colour do you see?")
KIND_QUESTIONS: Final = ("Which shape is it?", "What kind of shape do you see?")


@attrs.frozen(kw_only=True)
class ShapesOptions:
    """Options of `shapes`."""

    image_size: int = option(
        32,
        help="Width and height of a picture in pixels.",
        validator=check.and_(check.ge(16), check.le(1024)),
    )
    train_rows: int = option(20_000, help="Rows of the train split.", validator=check.ge(1))
    heldout_rows: int = option(256, help="Rows of the held-out split.", validator=check.ge(0))
    chat: bool = option(False, help="Whether the question is a turn of a chat, for the model's chat template.")


class Shapes:
    """The dataset: `row` is a pure function of the options, the run's seed, the split and the index."""

    def __init__(self, options: ShapesOptions, context: DatasetContext) -> None:
        self._options = options
        self._seed = context.seed

    def size(self, split: Split) -> int:
        """Number of rows."""
        return self._options.train_rows if split == "train" else self._options.heldout_rows

    def row(self, split: Split, index: int) -> Prompt:
        """Draw row `index` of the split.

        Raises:
            IndexError: `index` is not in `range(size(split))`.
        """
        if not 0 <= index < self.size(split):
            raise IndexError(f"shapes: row {index} of split {split!r}, which has {self.size(split)}")
        # A string seeds by its SHA-512, so a row is the same in every process and Python version.
        rng = random.Random(f"{self._seed}:{split}:{index}")  # noqa: S311 - pictures, not secrets
        drawing = draw_shape(rng, heldout=split == "heldout")
        question, answer = _ask(drawing, rng)
        text = (Message(role="user", content=question),) if self._options.chat else f"{question}\n"
        picture = data_url(drawing.picture(self._options.image_size))
        return Prompt(text=text, reference=answer, demonstration=answer, media=(picture,))


def _ask(drawing: Drawing, rng: random.Random) -> tuple[str, str]:
    if rng.random() < 0.5:
        return rng.choice(COLOUR_QUESTIONS), drawing.colour
    return rng.choice(KIND_QUESTIONS), drawing.kind
