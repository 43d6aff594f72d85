"""Rows that are drawn when they are asked for."""

from __future__ import annotations

import random
from typing import Final

import attrs
from attrs import validators as check

from cosmos_core.config import option
from cosmos_core.data import DrawnDataset
from cosmos_core.protocols import Dataset, DatasetCapabilities, DatasetContext, Provider, Split, hookimpl
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


class Shapes(DrawnDataset):
    """The dataset: rows are drawn from the run's seed."""

    def __init__(self, options: ShapesOptions, context: DatasetContext) -> None:
        super().__init__("shapes", context.seed, {"train": options.train_rows, "heldout": options.heldout_rows})
        self._options = options

    def draw(self, rng: random.Random, split: Split) -> Prompt:
        """Draw a shape and a question about it."""
        drawing = draw_shape(rng, heldout=split == "heldout")
        question, answer = _ask(drawing, rng)
        text = (Message(role="user", content=question),) if self._options.chat else f"{question}\n"
        picture = data_url(drawing.picture(self._options.image_size))
        return Prompt(text=text, reference=answer, demonstration=answer, media=(picture,))


def _ask(drawing: Drawing, rng: random.Random) -> tuple[str, str]:
    if rng.random() < 0.5:
        return rng.choice(COLOUR_QUESTIONS), drawing.colour
    return rng.choice(KIND_QUESTIONS), drawing.kind


@hookimpl
def cosmos_dataset() -> Provider[Dataset]:
    """Provide pictures of shapes."""
    capabilities = DatasetCapabilities(demonstrations=True, references=True)
    return Provider(create=Shapes, options=ShapesOptions, capabilities=capabilities)
