"""A tar as a source of rows: what its index tells, and its members by range when their turn comes."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, Final

import attrs

from cosmos_core.config import option
from cosmos_core.data import BadRowError, JsonLinesFile, RawRow
from cosmos_core.errors import DataError
from cosmos_core.storage import file_system, told
from cosmos_dataset_world.clips import Clip, ClipMapping, ClipOptions, Part
from cosmos_dataset_world.clips.cache import LocalCache
from cosmos_dataset_world.webdataset.index import index_of
from cosmos_dataset_world.webdataset.members import BLOCK, header

_CHUNK: Final = 8 << 20
"""Bytes that are fetched at once."""
_CAPTION: Final = re.compile(r"[\w.-]+(:\w+)?")


def _is_caption(_: object, attribute: attrs.Attribute[Any], value: str) -> None:
    if not _CAPTION.fullmatch(value):
        raise ValueError(f"{attribute.name}: {value!r}; give an extension such as `txt`, or `json:FIELD`")


@attrs.frozen(kw_only=True)
class WebDatasetOptions(ClipOptions):
    """The tars, and the members that are captions."""

    train: str = option(
        help="Path or URL of the train tars, such as `s3://bucket/clips/{000000..000063}.tar`; braces and globs take "
        "several. `${NAME}` and `${NAME:-default}` stand for environment variables; a relative path starts at the "
        "recipe."
    )
    heldout: str | None = option(None, help="Path or URL of the held-out tars.")
    caption: str = option(
        "txt",
        help="Extension of the members with captions; `json:FIELD` for a field of JSON members.",
        validator=_is_caption,
    )

    def __attrs_post_init__(self) -> None:
        ClipOptions.__attrs_post_init__(self)
        if self.heldout is not None and (self.heldout_rows is not None or self.heldout_fraction is not None):
            raise ValueError("give at most one of `heldout`, `heldout_rows` and `heldout_fraction`")


class ClipTar:
    """The clips of a tar.

    When all rows are checked, this is by their captions, sizes and names: what is in a video is looked at when it is
    fetched, as its turn comes.

    Args:
        url: Path or URL.
        options: What a row needs, and what is a caption.
        mapping: Looks at what was fetched.
        cache: Where it is fetched to.

    Raises:
        StorageError: The tar cannot be read.
    """

    def __init__(self, url: str, options: WebDatasetOptions, mapping: ClipMapping, cache: LocalCache) -> None:
        self._url: Final = url
        self._mapping: Final = mapping
        self._cache: Final = cache
        self._caption: Final = options.caption.partition(":")[0]
        self._kinds: Final = [
            *(["video"] if options.needs_video else []),
            *(["image"] if options.given == "image" else []),
            *(["embedding"] if options.embeddings != "ignored" else []),
        ]
        self._index: Final = index_of(url, options.caption)
        self._lines: Final = JsonLinesFile(self._index)

    @property
    def name(self) -> str:
        """The path or URL of the tar file."""
        return self._url

    @property
    def folder(self) -> Path:
        """The folder of its index; nothing is relative to it."""
        return self._index.parent

    def scan(self) -> Iterator[RawRow]:
        """Every clip once, in order; no member is fetched.

        Raises:
            DataError: Its index cannot be read.
        """
        for raw in self._lines.scan():
            problem = raw.problem or raw.row.get("problem", "")
            row = None if problem else self._clip(raw.row)
            yield RawRow(locator=raw.locator, line=raw.line, row=row, problem=problem and _named(raw, problem))

    def places(self) -> Iterator[int]:
        """The offset of each line of its index.

        Raises:
            DataError: Its index cannot be read.
        """
        return self._lines.places()

    def read(self, locator: int) -> Clip:
        """One clip, its members fetched.

        Raises:
            DataError: The clip is torn, or what was fetched cannot be used.
            StorageError: The store is gone or refuses, or the tar is another one now.
        """
        line = self._lines.read(locator)
        if line.get("problem"):
            raise DataError(f"{self._url}: {line['name']}: {line['problem']}")
        clip = self._clip(line)
        try:
            # What can be known before is not fetched to be found out.
            self._mapping.prompt(clip, self.folder)
            clip = self._clip(line, fetches=True)
            self._mapping.prompt(clip, self.folder)
        except BadRowError as error:
            raise DataError(f"{self._url}: {error}") from error
        return clip

    def _clip(self, line: dict[str, Any], *, fetches: bool = False) -> Clip:
        parts = {kind: self._part(line[kind], fetches=fetches) for kind in self._kinds if line.get(kind)}
        return Clip(name=line["name"], caption=line["caption"], caption_name=f"{line['name']}.{self._caption}", **parts)

    def _part(self, said: list[Any], *, fetches: bool) -> Part:
        name, offset, size, checksum = said
        path = None
        if fetches:
            key = hashlib.sha256(f"{self._index.stem} {offset}".encode()).hexdigest()[:32]
            suffix = PurePosixPath(name).suffix.lower()
            path = self._cache.get(f"{key}{suffix}", lambda to: self._fetch(to, offset, size, checksum))
        return Part(name=name, size_bytes=size, path=path)

    def _fetch(self, target: Path, offset: int, size: int, checksum: int) -> None:
        """Copy a member to a file, if it is still where it was."""
        with told(self._url):
            store, path = file_system(self._url)
            with target.open("wb") as file:
                for first in range(offset - BLOCK, offset + size, _CHUNK):
                    data = store.cat_file(path, start=first, end=min(first + _CHUNK, offset + size))
                    if first == offset - BLOCK:
                        said = header(data[:BLOCK])
                        if said is None or said.chksum != checksum:
                            raise OSError(f"byte {first} has another member than before; the tar was changed")
                        data = data[BLOCK:]
                    file.write(data)
                written = file.tell()
            if written != size:
                raise OSError(f"byte {offset} has {written:,} bytes of a member of {size:,}; the tar was changed")


def _named(raw: RawRow, problem: str) -> str:
    return problem if raw.row is None else f"{problem} ({raw.row['name']})"
