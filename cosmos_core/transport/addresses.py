"""Addresses: the one at which others reach this machine, its name and rack, endpoints, and lists of them.

All sockets, stores and process groups of a process have one answer. A machine may have several networks, and its name
may mean none of them to others, or loopback to itself. So the answer is the address from which this machine reaches
whom it has to speak with, as the kernel's routes say, unless COSMOS_HOST says another.

An endpoint as others are told of it is `tcp://HOST:PORT`, then `#` and a public key (hexadecimal), if it has one. Those
of all processes of a replica are one text, `ENDPOINT@HOST@RACK ENDPOINT@HOST@RACK …`; without a host, an endpoint is on
the replica's own, and without a rack it is not known in which one.

What cannot be told, because a name is unknown, no route leads there, or several addresses could be meant, is a
`TransportError` that says what to set; a malformed COSMOS_RACK is a `ReplicaError`.
"""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import attrs
import psutil
from zmq.utils import z85

from cosmos_core.config.checks import is_loopback
from cosmos_core.errors import ReplicaError, TransportError

HOST: Final = "COSMOS_HOST"
"""Environment variable with the address at which others reach this machine, or the interface that has it."""

WILDCARDS: Final = frozenset({"0.0.0.0", "*", "::"})  # noqa: S104 - compared with, not bound to
_FAMILIES: Final = (socket.AF_INET, socket.AF_INET6)
_ELSEWHERE: Final = ("192.0.2.1", "2001:db8::1")
"""Addresses of nobody (RFC 5737 and 3849): the way to them is the default route."""
_LOOPBACK: Final = "127.0.0.1"
RACK: Final = "COSMOS_RACK"
"""Environment variable with a label of the rack, switch or zone that this machine is in."""

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


def own_address(bind: str, peer: str = "") -> str:
    """The address of this machine that a process listens on and is reached at.

    The first that applies: `bind` (`control.bind`: of this machine or of the controller's, or one that means all), if
    it is loopback; what COSMOS_HOST says; `bind`, if it is an address of this machine; the one from which `peer` (the
    controller's host; empty for itself) is reached; that of the default route; the only one that is not loopback; and
    where there is no network, loopback.
    """
    bind = bind.strip("[]")
    if is_loopback(bind):
        return bind
    if chosen := os.environ.get(HOST, "").strip():
        return _chosen(chosen)
    if bind not in WILDCARDS and is_own(bind):
        return bind
    # A controller at a loopback address is one that is forwarded from elsewhere, or beside this process.
    if peer and not is_loopback(peer):
        return address_towards(peer)
    return _usual_address()


def address_towards(host: str) -> str:
    """The address of this machine from which another one is reached; sends nothing."""
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(host.strip("[]"), 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            # Connecting a datagram socket only asks the kernel which address it would use.
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise TransportError(
            f"this machine does not reach {host} ({error.strerror or error}): check the name, this machine's routes "
            f"(ip route get {host}), or say with {HOST}=ADDRESS at which address others reach it"
        ) from None


def is_own(address: str) -> bool:
    """True if an IP address is of this machine."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


def interface_of(address: str) -> str:
    """Name of this machine's network interface that has an IP address; empty if none has."""
    return next((interface for interface, own in _own_addresses() if own == address), "")


def interfaces() -> list[str]:
    """Names of this machine's network interfaces."""
    return sorted(psutil.net_if_addrs())


def in_url(address: str) -> str:
    """An IP address as it stands before a port: IPv6 in brackets."""
    return f"[{address}]" if ":" in address else address


def _chosen(text: str) -> str:
    """The address that COSMOS_HOST names: an address of this machine, or the first of an interface."""
    found = [*_own_addresses()]
    of_interface = [own for interface, own in found if interface == text]
    if of_interface:
        return of_interface[0]
    if (own := text.strip("[]")) in {address for _, address in found} or is_own(own):
        return own
    shown = ", ".join(f"{address} ({interface})" for interface, address in found)
    raise TransportError(
        f"{HOST}={text}: this machine has neither such an address nor such an interface; it has {shown}"
    )


def _usual_address() -> str:
    """The address of the default route; without one, the only address that is not loopback."""
    for elsewhere in _ELSEWHERE:
        try:
            return address_towards(elsewhere)
        except TransportError:
            continue
    found = [own for _, own in _own_addresses() if not is_loopback(own)]
    if len(found) > 1:
        raise TransportError(
            f"this machine has no default route and several addresses ({', '.join(found)}); say with {HOST}=ADDRESS at "
            "which of them others reach it"
        )
    return found[0] if found else _LOOPBACK


def _own_addresses() -> Iterator[tuple[str, str]]:
    """Interface and IP address; IPv4 first, without those that are valid on one link only."""
    by_interface = psutil.net_if_addrs()
    for family in _FAMILIES:
        for interface, addresses in by_interface.items():
            for each in addresses:
                if each.family == family and "%" not in each.address:
                    yield interface, each.address


@attrs.frozen(kw_only=True)
class Place:
    """An address, the machine that it is on, and the label of the rack that this stands in."""

    endpoint: str
    host: str
    rack: str = ""


def join_places(places: Iterable[Place]) -> str:
    """One text for some places."""
    return " ".join(f"{place.endpoint}@{place.host}@{place.rack}" for place in places)


def split_places(text: str, host: str) -> list[Place]:
    """The places of a text that `joined` made, or a single address, in order; `host` is of addresses without one."""
    triples = ([*word.split("@"), "", ""][:3] for word in text.split())
    return [Place(endpoint=endpoint, host=named or host, rack=rack) for endpoint, named, rack in triples]


def host_of(endpoint: str) -> str:
    """The host of an endpoint."""
    return without_key(endpoint).removeprefix("tcp://").rpartition(":")[0].strip("[]")


def without_key(endpoint: str) -> str:
    """An endpoint for people: without its key."""
    return endpoint.partition("#")[0]


def hexadecimal(public: str) -> str:
    """A public key as it is written into endpoints, where the characters of Z85 would have other meanings."""
    return z85.decode(public.encode("ascii")).hex()


def split_key(endpoint: str) -> tuple[str, str]:
    """Address and public key (Z85; empty if it has none) of an endpoint."""
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


def host_id() -> str:
    """A name of this machine since its last boot: processes with equal ones can share memory.

    The host's name alone is not enough (containers and cloned machines may share one), nor is the boot id (containers
    of one machine have the same, but not the same `/dev/shm`).
    """
    try:
        boot = _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        boot = "unknown-boot"
    return f"{platform.node()}/{boot}"


def rack_id() -> str:
    """The label of this machine's rack, as `COSMOS_RACK` gives it; empty if it does not."""
    label = os.environ.get(RACK, "").strip()
    if "@" in label or len(label.split()) > 1:
        raise ReplicaError(f"{RACK}={label!r}: a label has neither white space nor an @; give one word, such as rack-7")
    return label
