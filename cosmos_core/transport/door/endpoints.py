"""Endpoints as others are told of them: `tcp://HOST:PORT`, then `#` and a public key (hexadecimal), if any."""

from __future__ import annotations

from zmq.utils import z85

from cosmos_core.errors import TransportError


def host_of(endpoint: str) -> str:
    """The host of an endpoint."""
    return shown(endpoint).removeprefix("tcp://").rpartition(":")[0].strip("[]")


def shown(endpoint: str) -> str:
    """An endpoint for people: without its key."""
    return endpoint.partition("#")[0]


def hexadecimal(public: str) -> str:
    """A public key as it is written into endpoints, where the characters of Z85 would have other meanings."""
    return z85.decode(public.encode("ascii")).hex()


def parted(endpoint: str) -> tuple[str, str]:
    """Address and public key (Z85; empty if it has none) of an endpoint.

    Raises:
        TransportError: What follows its `#` is no key.
    """
    address, mark, text = endpoint.partition("#")
    if not mark:
        return address, ""
    try:
        raw = bytes.fromhex(text)
    except ValueError:
        raw = b""
    if len(raw) != 32:
        raise TransportError(f"{endpoint!r}: what follows the # is no public key (64 hexadecimal digits)")
    return address, z85.encode(raw).decode("ascii")
