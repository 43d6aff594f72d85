"""The dataset `crop-boards`: pictures with a board that only its own part of the picture shows.

A picture is grey, with one framed board in one of its 4 x 4 parts. The board is checkered in a colour and the colour
that makes grey with it, in squares of 2 pixels: scaled to a quarter, all boards are as grey as the ground, and only
where they are can be seen. Rows are a question, or one that a demonstrator has gone on with by a crop.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Final

import attrs
from attrs import validators as check
from PIL import Image

from cosmos_core.config import option
from cosmos_core.data import DrawnDataset, is_held_out
from cosmos_core.protocols import Dataset, DatasetCapabilities, DatasetContext, Provider, Split, hookimpl
from cosmos_core.types import Message, Prompt
from cosmos_environment_crop.pictures import Grid, data_url

HELDOUT_SHARE: Final = 0.2
"""Share of the pictures that only the held-out split has."""
ASKED_SHARE: Final = 0.3
"""Share of the rows of the train split in which the demonstrator has cropped."""
GRID: Final = Grid(columns=4, rows=4)
PART: Final = 32
"""Pixels of a part, each way."""
SQUARE: Final = 2
"""Pixels of a square of a board."""
GROUND: Final = (128, 128, 128)
FRAME: Final = (24, 24, 24)
COLOURS: Final[Mapping[str, tuple[int, int, int]]] = {
    "red": (228, 28, 28),
    "green": (28, 228, 28),
    "blue": (28, 28, 228),
    "white": (228, 228, 228),
}
QUESTION: Final = "What colour is the board?\n"


@attrs.frozen(kw_only=True)
class Board:
    """A board of a colour: its part of the picture, where it is in that, and its size, in units of 4 pixels."""

    colour: str
    column: int
    row: int
    left: int
    top: int
    size: int

    @property
    def part(self) -> str:
        """The name of its part."""
        return GRID.name(self.column, self.row)

    def picture(self) -> Image.Image:
        """The whole picture."""
        image = Image.new("RGB", (GRID.columns * PART, GRID.rows * PART), GROUND)
        left, top = self.column * PART + 4 * self.left, self.row * PART + 4 * self.top
        side = 4 * self.size
        image.paste(FRAME, (left, top, left + side, top + side))
        one = COLOURS[self.colour]
        other = tuple(2 * ground - value for ground, value in zip(GROUND, one, strict=True))
        image.paste(other, (left + 4, top + 4, left + side - 4, top + side - 4))
        for y in range(4, side - 4, SQUARE):
            for x in range(4 + (y + SQUARE) % 4, side - 4, 2 * SQUARE):
                image.paste(one, (left + x, top + y, left + x + SQUARE, top + y + SQUARE))
        return image


def draw_board(rng: random.Random, *, heldout: bool) -> Board:
    """Draw a board of one split; it is wholly in its part."""
    while True:
        size = rng.randint(5, 7)
        board = Board(
            colour=rng.choice(tuple(COLOURS)),
            column=rng.randrange(GRID.columns),
            row=rng.randrange(GRID.rows),
            left=rng.randint(0, PART // 4 - size),
            top=rng.randint(0, PART // 4 - size),
            size=size,
        )
        if is_held_out(repr(attrs.astuple(board)), HELDOUT_SHARE) == heldout:
            return board


@attrs.frozen(kw_only=True)
class BoardsOptions:
    """Options of `crop-boards`."""

    train_rows: int = option(20_000, help="Rows of the train split.", validator=check.ge(1))
    heldout_rows: int = option(256, help="Rows of the held-out split, all of them questions.", validator=check.ge(0))
    crop: bool = option(
        True,
        help="Whether demonstrators may crop; else each sees through the grey, and says the colour at once.",
    )
    guesses: float = option(
        0.6,
        help="Share of the questions to which a demonstrator that may crop says some colour at once.",
        validator=check.and_(check.ge(0.0), check.le(1.0)),
    )


class Boards(DrawnDataset):
    """The dataset: rows are drawn from the run's seed."""

    def __init__(self, options: BoardsOptions, context: DatasetContext) -> None:
        super().__init__("crop-boards", context.seed, {"train": options.train_rows, "heldout": options.heldout_rows})
        self._options = options

    def draw(self, rng: random.Random, split: Split) -> Prompt:
        """Draw a board, the question, and how far a demonstrator has come."""
        board = draw_board(rng, heldout=split == "heldout")
        picture = board.picture()
        turns = [Message(role="user", content=QUESTION)]
        asked, answer = f"crop {board.part}", f"#### {board.colour}"
        if self._options.crop:
            if split == "train" and rng.random() < ASKED_SHARE:
                edges = GRID.edges(board.part, picture.size)
                turns += [
                    Message(role="assistant", content=asked),
                    Message(role="user", content="\n", media=(data_url(picture.crop(edges)),)),
                ]
            else:
                answer = f"#### {rng.choice(tuple(COLOURS))}" if rng.random() < self._options.guesses else asked
        return Prompt(
            text=tuple(turns),
            media=(data_url(picture),),
            reference=board.colour,
            demonstration=answer,
            metadata={"part": board.part},
        )


@hookimpl
def cosmos_dataset() -> Provider[Dataset]:
    """Provide pictures with boards."""
    capabilities = DatasetCapabilities(demonstrations=True, references=True)
    return Provider(create=Boards, options=BoardsOptions, capabilities=capabilities)
