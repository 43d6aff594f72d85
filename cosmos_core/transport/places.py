"""Several addresses under one purpose of `Hello.endpoints`: one for each process of a replica.

Written `ENDPOINT@HOST ENDPOINT@HOST …`; without a host, the endpoint is on the replica's own.
"""

from __future__ import annotations

from collections.abc import Iterable

import attrs


@attrs.frozen(kw_only=True)
class Place:
    """An address and the machine that it is on."""

    endpoint: str
    host: str


def joined(places: Iterable[Place]) -> str:
    """One text for some places."""
    return " ".join(f"{place.endpoint}@{place.host}" for place in places)


def parted(text: str, host: str) -> list[Place]:
    """The places of a text, in order.

    Args:
        text: What `joined` made, or a single address.
        host: Of addresses without one.
    """
    pairs = (word.partition("@") for word in text.split())
    return [Place(endpoint=endpoint, host=named or host) for endpoint, _, named in pairs]
