"""Pictures at locations, and the parts of a picture that a grid names."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

import attrs
from PIL import Image, ImageOps

from cosmos_core.errors import DataError

_SHOWN: Final = 80
COLUMNS: Final = "abcdefghijklmnopqrstuvwxyz"


@attrs.frozen(kw_only=True)
class Grid:
    """Parts of a picture, named as the fields of a chess board: letters for columns, numbers for rows from the top."""

    columns: int
    rows: int

    def name(self, column: int, row: int) -> str:
        """The name of a part."""
        return f"{COLUMNS[column]}{row + 1}"

    def edges(self, name: str, size: tuple[int, int]) -> tuple[int, int, int, int] | None:
        """Left, top, right and bottom of a part of a picture of this size; None if none has this name."""
        column, row = COLUMNS.find(name[:1].lower() or "?"), name[1:]
        if not 0 <= column < self.columns or row not in map(str, range(1, self.rows + 1)):
            return None
        place, (width, height) = int(row) - 1, size
        left, right = (width * edge // self.columns for edge in (column, column + 1))
        top, bottom = (height * edge // self.rows for edge in (place, place + 1))
        return left, top, max(right, left + 1), max(bottom, top + 1)

    @property
    def words(self) -> str:
        """The names, in words."""
        return f"{self.name(0, 0)} to {self.name(self.columns - 1, self.rows - 1)}"


def load(location: str) -> Image.Image:
    """The picture at a local path or in a `data:` URL, in RGB, upright.

    Raises:
        DataError: There is none.
    """
    try:
        with Image.open(_source(location)) as image:
            return ImageOps.exif_transpose(image).convert("RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise DataError(f"environment crop: the row's picture {location[:_SHOWN]!r} cannot be read: {error}") from error


def _source(location: str) -> Path | io.BytesIO:
    if location.startswith("data:"):
        return io.BytesIO(base64.b64decode(location.partition(",")[2], validate=True))
    return Path(unquote(urlsplit(location).path)) if location.startswith("file:") else Path(location)


def data_url(image: Image.Image) -> str:
    """A picture as a location of its own."""
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
