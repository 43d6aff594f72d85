"""The files of the page, read once: only these are served, whatever path is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources
from typing import Final

import attrs

_TYPES: Final[Mapping[str, str]] = {
    "html": "text/html",
    "css": "text/css",
    "js": "text/javascript",
    "svg": "image/svg+xml",
}
_PATHS: Final[Mapping[str, str]] = {
    "/": "page.html",
    "/page.css": "page.css",
    "/page.js": "page.js",
    "/charts.js": "charts.js",
    "/stream.js": "stream.js",
    "/icon.svg": "icon.svg",
}


@attrs.frozen(kw_only=True)
class Asset:
    """A file and its media type."""

    content: bytes
    media_type: str


def load_assets() -> dict[str, Asset]:
    """Every file of the page, by the path that it is served at."""
    folder = resources.files(__package__) / "assets"
    return {
        path: Asset(content=(folder / name).read_bytes(), media_type=_TYPES[name.rpartition(".")[2]])
        for path, name in _PATHS.items()
    }
