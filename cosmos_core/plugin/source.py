"""Where a plugin's code comes from: its distribution, who made it, and the folder that it lies in."""

from __future__ import annotations

import json
import re
from importlib.metadata import Distribution
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit
from urllib.request import url2pathname

import attrs

_IDENTITY: Final = re.compile(r"^(Name|Version):[ \t]*(.*?)\s*$", re.MULTILINE)
_HOME_LABELS: Final = ("homepage", "home", "repository", "source", "source code", "documentation")


@attrs.frozen
class Identity:
    """Name and version of a distribution; empty where they are missing, as in what an interrupted pip leaves behind."""

    name: str
    version: str


@attrs.frozen(kw_only=True)
class Source:
    """A distribution, as its metadata describes it.

    Attributes:
        summary: One line of its own.
        home_page: Address of its home page or repository.
        licence: SPDX expression, or the name that its metadata gives.
        location: Folder that it is installed in.
        editable: The project's folder, where it is installed with `pip install -e`; None otherwise.
    """

    summary: str
    home_page: str
    licence: str
    location: Path
    editable: Path | None


def identity(dist: Distribution) -> Identity:
    """Name and version. Reads them without parsing the rest: a listing asks this of all that is installed."""
    headers = (dist.read_text("METADATA") or dist.read_text("PKG-INFO") or "").partition("\n\n")[0]
    found = dict(reversed(_IDENTITY.findall(headers)))
    return Identity(found.get("Name", ""), found.get("Version", ""))


def source(dist: Distribution) -> Source:
    """Where a distribution comes from."""
    return Source(
        summary=field(dist, "Summary"),
        home_page=field(dist, "Home-page") or _home_page(dist.metadata.get_all("Project-URL") or []),
        licence=licence(dist),
        location=Path(str(dist.locate_file(""))),
        editable=editable_folder(dist),
    )


def field(dist: Distribution, key: str) -> str:
    """A field of the metadata; empty where it is missing, as in what an interrupted pip leaves behind."""
    try:
        metadata = dist.metadata
    except FileNotFoundError:
        return ""
    return metadata[key] if key in metadata else ""  # noqa: SIM401  # `get` is not in its protocol on Python 3.11


def licence(dist: Distribution) -> str:
    """The licence, from the newest of the three ways to say it; empty if it says none."""
    named = field(dist, "License-Expression") or field(dist, "License").partition("\n")[0]
    if named:
        return named
    classifiers = dist.metadata.get_all("Classifier") or []
    return next((each.rpartition(" :: ")[2] for each in classifiers if each.startswith("License :: ")), "")


def editable_folder(dist: Distribution) -> Path | None:
    """The project's folder of an editable installation; None of any other."""
    origin = json.loads(dist.read_text("direct_url.json") or "{}")
    if not origin.get("dir_info", {}).get("editable"):
        return None
    return Path(url2pathname(urlsplit(origin["url"]).path))


def _home_page(urls: list[str]) -> str:
    """The project's address: the best of its labelled ones, or the first."""
    labelled = {label.strip().lower(): address.strip() for label, _, address in (url.partition(",") for url in urls)}
    best = [labelled[label] for label in _HOME_LABELS if label in labelled]
    return next(iter([*best, *labelled.values()]), "")
