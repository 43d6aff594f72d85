"""Several addresses under one purpose of `Hello.endpoints`: one for each process of a replica.

Written `ENDPOINT@HOST@RACK ENDPOINT@HOST@RACK …`; without a host, the endpoint is on the replica's own, and without a
rack it is not known in which one.
"""

from __future__ import annotations

from collections.abc import Iterable

import attrs


@attrs.frozen(kw_only=True)
class Place:
    """An address, the machine that it is on, and the label of the rack that this stands in."""

    endpoint: str
    host: str
    rack: str = ""


def joined(places: Iterable[Place]) -> str:
    """One text for some places."""
    return " ".join(f"{place.endpoint}@{place.host}@{place.rack}" for place in places)


def parted(text: str, host: str) -> list[Place]:
    """The places of a text, in order.

    Args:
        text: What `joined` made, or a single address.
        host: Of addresses without one.
    """
    triples = ([*word.split("@"), "", ""][:3] for word in text.split())
    return [Place(endpoint=endpoint, host=named or host, rack=rack) for endpoint, named, rack in triples]
