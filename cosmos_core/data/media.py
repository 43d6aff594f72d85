"""Locations of the images and videos that a row names."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from cosmos_core.data.rows import BadRowError, field

SCHEMES: Final = ("data:", "file:", "http:", "https:", "s3:", "gs:")


def locations(row: Mapping[str, Any], name: str, folder: Path) -> tuple[str, ...]:
    """The locations in field `name`, in order: one location or a list of them; null or an empty list is none.

    A path is relative to the folder of the row's file, and has to exist. A URL stays as it is; whether it can be read
    is for the model to say. An image inside a Parquet file (`bytes`, as the `datasets` library stores it) becomes a
    data URL.

    Raises:
        BadRowError: The field is missing, has something else in it, or names a path that cannot be or does not exist.
    """
    value = field(row, name)
    listed = [] if value is None else value if isinstance(value, list) else [value]
    return tuple(_location(each, name, folder) for each in listed)


def _location(value: Any, name: str, folder: Path) -> str:
    if isinstance(value, Mapping) and isinstance(data := value.get("bytes"), bytes):
        # As MP4 and QuickTime begin, Matroska and WebM, or AVI.
        if data[4:8] == b"ftyp" or data[:4] == b"\x1aE\xdf\xa3" or (data[:4] == b"RIFF" and data[8:12] == b"AVI "):
            raise BadRowError(
                f"field {name!r} has a video's bytes, and models read videos from files; write it to one, and name that"
            )
        # Readers tell the format of an image from its first bytes, whatever a URL says.
        return f"data:image/png;base64,{base64.b64encode(data).decode()}"
    if isinstance(value, Mapping):
        value = value.get("path")
    if not isinstance(value, str) or not value:
        raise BadRowError(
            f"field {name!r} has {value!r:.80}, not the location of an image or video",
            f"field {name!r} has no location of an image or video",
        )
    if value.startswith(SCHEMES):
        return value
    try:
        path = (folder / Path(value).expanduser()).resolve()
        is_there = path.exists()
    # A name that is too long, such as an image in base64; a loop of links; a home of nobody; a NUL.
    except (OSError, RuntimeError, ValueError) as error:
        raise BadRowError(
            f"field {name!r} has {value!r:.80}, which is no path ({error!s:.80}); an image in the row itself is a "
            "URL, `data:image/png;base64,...`",
            f"field {name!r} has no path",
        ) from None
    if not is_there:
        raise BadRowError(
            f"field {name!r} names {value!r}, and there is no {path}",
            f"field {name!r} names a file that does not exist",
        )
    return str(path)
