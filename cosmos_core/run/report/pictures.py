"""Frames of held-out images and videos, as `data:` URLs to be inlined."""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import attrs

from cosmos_core.control.machine.records import EvaluationRecord

_PLACE: Final = re.compile(r"(media/step-[0-9]{1,12}/row-[0-9]{1,12})\.(png|mp4|webp)")
_MOST_BYTES: Final = 8 << 20
"""Of all strips of a page: larger ones are left out, and a link to the file stays."""
_MOST_COLUMNS: Final = 6


@attrs.frozen(kw_only=True)
class Picture:
    """An image or video in the run's folder, and some of its frames as a `data:` URL; none where it is not shown."""

    file: str
    strip: str


class Album:
    """The pictures of a run, as long as there is room for them in the page."""

    def __init__(self, directory: Path) -> None:
        self._directory: Final = directory
        self._left = _MOST_BYTES

    def picture(self, media: str) -> Picture | None:
        """The picture of a held-out completion's media; None for anything but media of this run."""
        place = _PLACE.fullmatch(media)
        if place is None:
            return None
        path = self._directory / f"{place[1]}.strip.webp"
        try:
            data = path.read_bytes() if path.stat().st_size <= self._left else b""
        except OSError:
            data = b""
        self._left -= len(data)
        strip = f"data:image/webp;base64,{base64.b64encode(data).decode()}" if data else ""
        return Picture(file=media, strip=strip)


@attrs.frozen(kw_only=True)
class ContactSheet:
    """Held-out rows over the run: the version of each column, and each row's number with its picture in each."""

    versions: Sequence[int]
    rows: Sequence[tuple[int, Sequence[Picture | None]]]


def contact_sheet(evaluations: Sequence[EvaluationRecord], album: Album) -> ContactSheet | None:
    """Some evaluations, the first and the last among them; None where nothing was rendered."""
    seen = [record for record in evaluations if any(each.media for each in record.completions)]
    if not seen:
        return None
    number = min(len(seen), _MOST_COLUMNS)
    chosen = [seen[round(column * (len(seen) - 1) / max(1, number - 1))] for column in range(number)]
    named = [{each.row: each.media for each in record.completions} for record in chosen]
    rows = sorted({row for column in named for row in column})
    return ContactSheet(
        versions=[record.version for record in chosen],
        rows=[(row, [album.picture(column.get(row, "")) for column in named]) for row in rows],
    )
