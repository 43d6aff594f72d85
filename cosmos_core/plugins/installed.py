"""Installed distributions, whatever their metadata looks like: one that is damaged must not hide the others."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Iterator, Sequence
from importlib.metadata import Distribution
from typing import Any, final


@final
class Readable(Distribution):
    """A distribution whose files can be read even where they are not UTF-8; everything else follows from that."""

    def __init__(self, dist: Distribution) -> None:
        self._dist = dist

    def read_text(self, filename: str) -> str | None:
        """The text of a metadata file, undecodable bytes replaced; None if there is none that can be read."""
        try:
            return self._dist.read_text(filename)
        except UnicodeDecodeError as error:
            return error.object.decode(errors="replace")
        except OSError:
            return None

    # The type of what this returns differs between versions of Python.
    def locate_file(self, path: str | os.PathLike[str]) -> Any:
        """Where a file of the distribution is, given its path in the record."""
        return self._dist.locate_file(path)


def distributions(path: Sequence[str] | None = None) -> Iterator[Readable]:
    """Everything that is installed, or that lies in the folders of `path`."""
    found = importlib.metadata.distributions() if path is None else importlib.metadata.distributions(path=[*path])
    return map(Readable, found)


def distribution(name: str) -> Readable:
    """The installed distribution of a name.

    Raises:
        PackageNotFoundError: There is none.
    """
    return Readable(importlib.metadata.distribution(name))
