"""Everything there is to know of one loaded plugin: source, capabilities, options."""

from __future__ import annotations

from typing import Any

import attrs

from cosmos_core.config.reference import Key, keys
from cosmos_core.config.structure import unstructure
from cosmos_core.plugins.declared import Declared, declared
from cosmos_core.plugins.discovery import PluginRecord
from cosmos_core.plugins.installed import distribution
from cosmos_core.plugins.manifest import manifest
from cosmos_core.plugins.selection import PluginSet
from cosmos_core.plugins.source import Source, source
from cosmos_core.protocols import Kind


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
