"""The environment `crop`: the model asks for a part of the row's picture, and is shown it.

A turn whose last line is `crop b3` is answered with that part of the picture, pixel for pixel; any other turn is the
model's answer, and the last.
"""

from __future__ import annotations

import asyncio

import attrs
from attrs import validators as check
from PIL import Image

from cosmos_core.config import option
from cosmos_core.errors import DataError
from cosmos_core.protocols import Environment, EnvironmentCapabilities, EnvironmentContext, Provider, Turn, hookimpl
from cosmos_core.types import Prompt
from cosmos_environment_crop.pictures import COLUMNS, Grid, data_url, load


@attrs.frozen(kw_only=True)
class CropOptions:
    """Options of `crop`."""

    columns: int = option(
        4, help="Columns of the grid, named by letters.", validator=check.and_(check.ge(1), check.le(len(COLUMNS)))
    )
    rows: int = option(
        4, help="Rows of the grid, numbered from the top.", validator=check.and_(check.ge(1), check.le(99))
    )
    max_crops: int = option(
        4, help="Parts that a dialogue is shown at most; 0: none, and each turn is the last.", validator=check.ge(0)
    )
    observation: str = option("\n", help="What is said beside a part.")
    prefix: str = option("crop", help="What a line that asks for a part begins with.", validator=check.min_len(1))


class Crop:
    """Shows parts of a picture. Its own reward counts them."""

    def __init__(self, options: CropOptions, context: EnvironmentContext) -> None:  # noqa: ARG002 - all are given one
        self._options = options
        self._grid = Grid(columns=options.columns, rows=options.rows)
        self._left = options.max_crops
        self._picture: Image.Image

    async def reset(self, prompt: Prompt, seed: int) -> None:  # noqa: ARG002 - the prompt says it all
        """Read the row's first picture.

        Raises:
            DataError: It has none, or it cannot be read.
        """
        turns = () if isinstance(prompt.text, str) else prompt.text
        shown = [*prompt.media, *(location for turn in turns for location in turn.media)]
        if not shown:
            raise DataError("environment crop: the row shows no picture; use a dataset whose rows do")
        self._picture = await asyncio.to_thread(load, shown[0])

    async def step(self, text: str) -> Turn:
        """The part that the last line names; a turn that asks for none ends the dialogue."""
        lines = text.rstrip().splitlines()
        asked, prefix = lines[-1].strip() if lines else "", self._options.prefix
        rest = asked.removeprefix(prefix)
        is_other_word = rest[:1].isalpha() and prefix[-1].isalpha()  # such as "cropped"
        if not self._left or not asked.startswith(prefix) or is_other_word:
            return Turn(done=True)
        name = rest.strip()
        edges = self._grid.edges(name, self._picture.size)
        if edges is None:
            return Turn(observation=f"no part: {self._grid.words}\n", detail=f"no part {name:.20}")
        self._left -= 1
        part = await asyncio.to_thread(lambda: data_url(self._picture.crop(edges)))
        return Turn(observation=self._options.observation, media=(part,), reward=1.0, detail=name)

    async def close(self) -> None:
        """There is nothing to let go of."""


@hookimpl
def cosmos_environment() -> Provider[Environment]:
    """The provider hook."""
    capabilities = EnvironmentCapabilities(rewards=True, deterministic=True)
    return Provider(create=Crop, options=CropOptions, capabilities=capabilities)
