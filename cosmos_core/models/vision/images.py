"""A prompt's images: local files and `data:` URLs. Nothing is fetched while training."""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Callable
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from PIL import Image, ImageOps, UnidentifiedImageError

from cosmos_core.errors import DataError

IMAGE_ERRORS: Final = (UnidentifiedImageError, OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError)
"""What Pillow raises on what is no image."""

SHOWN: Final = 80
"""Characters of a `data:` URL that an error shows: it may have millions."""
_LONGEST_PATH: Final = 4096


def load_image(location: str) -> Image.Image:
    """The image at a path, a `file:` URL, or a `data:` URL, in RGB.

    Raises:
        DataError: There is none, it cannot be read, or it would have to be fetched.
    """
    if location.startswith("data:"):
        held = inline_bytes(location, "data:image/", "an image in base64, data:image/png;base64,…")
        return open_image(io.BytesIO(held), location)
    path = local_path(location)
    if not path.is_file():
        raise DataError(f"media {shown(location)}: no such file")
    return open_image(path, location)


def open_image(
    source: Path | io.BytesIO, location: str, check: Callable[[int, int], None] | None = None
) -> Image.Image:
    """The image in a file, in RGB, upright: cameras write beside the pixels how to turn them.

    `check` is told its height and width as stored, and may refuse it before anything is decoded.

    Raises:
        DataError: It cannot be read.
    """
    try:
        with Image.open(source) as image:
            if check is not None:
                check(image.height, image.width)
            return ImageOps.exif_transpose(image).convert("RGB")
    except IMAGE_ERRORS as error:
        raise DataError(f"media {shown(location)}: no readable image: {error}") from error


def local_path(location: str) -> Path:
    """The path of a location that is no `data:` URL.

    Raises:
        DataError: It would have to be fetched.
    """
    if location.startswith("file:"):
        return Path(unquote(urlsplit(location).path))
    if "://" in location:
        raise DataError(f"media {shown(location)}: nothing is fetched while training; store it and give its path")
    return Path(location)


def inline_bytes(location: str, start: str, expected: str) -> bytes:
    """The content of a `data:` URL, which must begin with `start`; an error says what is expected."""
    head, _, data = location.partition(",")
    if not head.startswith(start) or not head.endswith(";base64"):
        raise DataError(f"media {shown(location)}: a data URL is {expected}")
    try:
        return base64.b64decode(data, validate=True)
    except binascii.Error as error:
        raise DataError(f"media {shown(location)}: no base64: {error}") from error


def shown(location: str) -> str:
    """A location as an error shows it."""
    most = SHOWN if location.startswith("data:") else _LONGEST_PATH
    return repr(location if len(location) <= most else f"{location[:most]}…")
