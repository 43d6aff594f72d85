"""Rows and their sources: fields of a raw row, images and videos that it names, and why a row cannot be used."""

from __future__ import annotations

import base64
import difflib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Protocol

import attrs


class BadRowError(Exception):
    """A row cannot be used; whoever knows its source and place turns this into a `DataError`.

    Args:
        message: What is wrong, with the value seen.
        kind: What rows of the same fault have in common, to count them by; the message if empty.
        missing: The field that the row does not have, if that is it.
    """

    def __init__(self, message: str, kind: str = "", missing: str = "") -> None:
        super().__init__(message)
        self.kind = kind or message
        self.missing = missing
        self.option = ""
        """Name of the option that names the missing field, if known."""


class LeftOutError(BadRowError):
    """The row is sound, and a filter leaves it out."""


def field(row: Mapping[str, Any], name: str) -> Any:
    """The field `name` of a row; raises BadRowError if there is none; the message names the nearest, or all."""
    if name in row:
        return row[name]
    near = difflib.get_close_matches(name, list(row), n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(map(repr, row)) or 'none'}"
    raise BadRowError(f"no field {name!r}; {hint}", f"no field {name!r}", name)


def text_field(row: Mapping[str, Any], name: str) -> str:
    """The field `name` as text; raises BadRowError if there is none, or it is neither text nor a number."""
    value = field(row, name)
    if isinstance(value, str):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    kind = "null" if value is None else f"a {type(value).__name__}"
    raise BadRowError(f"field {name!r} is {kind}, not text")


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


@attrs.frozen(kw_only=True)
class RawRow:
    """One row as a scan finds it.

    Attributes:
        locator: Where it is, for `RowSource.read`.
        line: Its line (or row) from 1, for people.
        row: What it holds; None if it could not be parsed.
        problem: Why it could not; empty if it could.
    """

    locator: int
    line: int
    row: Any
    problem: str = ""


class RowSource(Protocol):
    """A file, or a table, of rows. Only the locators of its rows are kept in memory."""

    @property
    def name(self) -> str:
        """The name of the source in messages, such as its path."""
        ...

    @property
    def folder(self) -> Path:
        """The folder that relative paths in its rows start at."""
        ...

    def scan(self) -> Iterator[RawRow]:
        """Every row once, in order; raises DataError if the source cannot be read."""
        ...

    def places(self) -> Iterator[int]:
        """The locator of every row, in order, without reading what the rows hold.

        Raises:
            DataError: The source cannot be read.
        """
        ...

    def read(self, locator: int) -> Any:
        """One row again; may be called from several threads at once.

        Raises:
            DataError: The source changed or cannot be read.
        """
        ...
