"""Describes one loaded plugin for `cosmos plugins show`: source, capabilities, options."""

from __future__ import annotations

import inspect
import re
from importlib.metadata import Distribution
from pathlib import Path
from typing import Any, Final

import attrs

from cosmos_core.config.structure import unstructure
from cosmos_core.plugins.discovery import PluginRecord
from cosmos_core.plugins.distributions import distribution, editable_folder, field, licence
from cosmos_core.plugins.manifest import manifest
from cosmos_core.plugins.selection import PluginSet
from cosmos_core.protocols import Kind
from cosmos_service_tools.reference import Key, as_text, keys

_HOME_LABELS: Final = ("homepage", "home", "repository", "source", "source code", "documentation")
_ITEM: Final = re.compile(r"^    (\w+): (.*(?:\n {8}.*)*)", re.MULTILINE)


@attrs.frozen(kw_only=True)
class Declared:
    """One capability.

    Attributes:
        name: Its name in the record.
        value: What the plugin declares, as text.
        meaning: What the record's docstring says of it.
    """

    name: str
    value: str
    meaning: str


def declared(capabilities: object) -> list[Declared]:
    """The items of a capabilities record; none for a kind that declares nothing."""
    cls: Any = type(capabilities)
    if not attrs.has(cls):
        return []
    section = inspect.cleandoc(cls.__doc__ or "").partition("Attributes:\n")[2]
    meanings = {name: " ".join(text.split()) for name, text in _ITEM.findall(section)}
    return [
        Declared(name=name, value=as_text(getattr(capabilities, name)), meaning=meanings.get(name, ""))
        for name in attrs.fields_dict(cls)
    ]


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


def source(dist: Distribution) -> Source:
    """The source that a distribution comes from."""
    return Source(
        summary=field(dist, "Summary"),
        home_page=field(dist, "Home-page") or _home_page(dist.metadata.get_all("Project-URL") or []),
        licence=licence(dist),
        location=Path(str(dist.locate_file(""))),
        editable=editable_folder(dist),
    )


@attrs.frozen(kw_only=True)
class Card:
    """One plugin.

    Attributes:
        record: Its entry point.
        source: Its distribution.
        sha256: Hash of its files, as in the manifest of a run.
        protocol: The protocol version that it was written for.
        capabilities: What it declares.
        options: What it takes.
    """

    record: PluginRecord
    source: Source
    sha256: str
    protocol: int
    capabilities: list[Declared]
    options: list[Key]


def card(plugins: PluginSet, kind: Kind, name: str) -> Card:
    """The card of a loaded plugin.

    Raises:
        PluginBrokenError: Its files cannot be read.
    """
    record, provider = plugins.record(kind, name), plugins.provider(kind, name)
    (entry,) = manifest([record])
    return Card(
        record=record,
        source=source(distribution(record.distribution)),
        sha256=entry["sha256"],
        protocol=provider.protocol,
        capabilities=declared(provider.capabilities),
        options=keys(provider.options),
    )


def plain(shown: Card) -> dict[str, Any]:
    """A card as plain data, the record's fields at its top."""
    data: dict[str, Any] = unstructure(shown)
    return {**data.pop("record"), **data}


def _home_page(urls: list[str]) -> str:
    """The project's address: the best of its labelled ones, or the first."""
    labelled = {label.strip().lower(): address.strip() for label, _, address in (url.partition(",") for url in urls)}
    best = [labelled[label] for label in _HOME_LABELS if label in labelled]
    return next(iter([*best, *labelled.values()]), "")
