"""Describes one loaded plugin for `cosmos plugins show`: source, capabilities, options."""

from __future__ import annotations

import inspect
import re
from typing import Any, Final

import attrs

from cosmos_core.config.reference import Key, as_text, keys
from cosmos_core.config.structure import unstructure
from cosmos_core.plugins.discovery import PluginRecord
from cosmos_core.plugins.distributions import Source, distribution, source
from cosmos_core.plugins.manifest import manifest
from cosmos_core.plugins.selection import PluginSet
from cosmos_core.protocols import Kind

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
        for name in (field.name for field in attrs.fields(cls))
    ]


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
