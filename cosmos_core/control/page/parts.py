"""A snapshot as the parts that browsers get: each is sent only if it has changed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

import attrs
import msgspec

from cosmos_core.control.live.snapshot import Snapshot

_ENCODER: Final = msgspec.json.Encoder()
_OWN_PARTS: Final = ("curves", "samples", "news")
"""Fields that change seldom, or that are long."""

Parts = Mapping[str, bytes]
"""JSON by the name of the part; what has not changed is the very same object as before."""


def parts_of(snapshot: Snapshot, before: Parts) -> Parts:
    """The parts of a snapshot.

    Args:
        snapshot: The run.
        before: Parts of the snapshot before.
    """
    rest = {
        field.name: getattr(snapshot, field.name) for field in attrs.fields(Snapshot) if field.name not in _OWN_PARTS
    }
    found = {name: _ENCODER.encode(getattr(snapshot, name)) for name in _OWN_PARTS} | {"run": _ENCODER.encode(rest)}
    return {name: before[name] if before.get(name) == data else data for name, data in found.items()}


def changes(parts: Parts, known: Parts) -> Iterator[tuple[str, bytes]]:
    """The parts that somebody who knows `known` lacks."""
    return ((name, data) for name, data in parts.items() if known.get(name) is not data)


def whole(parts: Parts) -> bytes:
    """All parts as one JSON object."""
    return b"{" + b",".join(b'"%s":%s' % (name.encode(), data) for name, data in parts.items()) + b"}"


def as_event(name: str, data: bytes) -> bytes:
    """A part as a server-sent event; JSON has no line breaks outside of its strings, and none unescaped in them."""
    return b"event: %s\ndata: %s\n\n" % (name.encode(), data)
