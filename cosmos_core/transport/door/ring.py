"""The keys of a process: its own, and those of others whom it serves.

Whatever listens besides the controller makes a key of its own for as long as it lives, and says it in its endpoint,
which reaches others through the controller. So nobody can pretend to be a replica that serves samples or weights.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Final

from cosmos_core.errors import TransportError
from cosmos_core.transport.door.endpoints import parted
from cosmos_core.transport.door.guard import Guarded, listen
from cosmos_core.transport.keys.allowed import AllowList
from cosmos_core.transport.keys.key import ALLOWED, Key, KeyPair, PeerRole
from cosmos_core.transport.sockets import Context, Curve, Limits, Socket, dealer


class Ring:
    """What a process needs to speak with others.

    Attributes:
        own: Its key.
        allowed: Who may speak to it.
    """

    def __init__(self, folder: Path, own: Key) -> None:
        """Read the allow-list of a folder of keys.

        Raises:
            ConfigError: It cannot be read.
        """
        self.own: Final = own
        self.allowed: Final = AllowList(folder / ALLOWED)


def serve(ring: Ring | None, context: Context, bind: str, limits: Limits, roles: Collection[PeerRole]) -> Guarded:
    """Listen at a free port of `bind` for those who have one of the roles; for anyone, without a ring.

    Raises:
        TransportError: The address cannot be listened on.
    """
    if ring is None:
        return listen(context, bind, 0, limits)
    return listen(context, bind, 0, limits, own=KeyPair.new(), allowed=ring.allowed, roles=roles)


def reach(
    ring: Ring | None,
    context: Context,
    endpoint: str,
    identity: bytes,
    limits: Limits,
    *,
    queued: bool = False,
    events: int = 0,
) -> Socket:
    """Connect to an endpoint of `serve`; the arguments are those of `sockets.dealer`.

    Raises:
        TransportError: It is no endpoint, or it has a key and this process has none, or the other way round.
    """
    address, server = parted(endpoint)
    if ring is None and server:
        raise TransportError(f"{endpoint}: it has a key, and this process has none; where is its folder of keys?")
    if ring is not None and not server:
        raise TransportError(f"{endpoint}: it has no key, and this process speaks with none that has none")
    curve = None if ring is None else Curve(own=ring.own.pair, server=server)
    return dealer(context, address, identity, limits, queued=queued, curve=curve, events=events)
