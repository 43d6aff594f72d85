"""Which network interface process groups use: that of this process's address, unless the environment names another.

torch's default group takes gloo's interface from `GLOO_SOCKET_IFNAME`, and else that of the machine's name, which may
be loopback; NCCL takes the one that it finds best. A group that is made here uses the
address itself, as an interface may have several.
"""

from __future__ import annotations

import os
from typing import Any, Final

from torch.distributed import ProcessGroupGloo

from cosmos_core.config.checks import is_loopback
from cosmos_core.errors import ReplicaError
from cosmos_core.transport.addresses import interface_of, interfaces

GLOO: Final = "GLOO_SOCKET_IFNAME"
NCCL: Final = "NCCL_SOCKET_IFNAME"
_OURS: Final = "COSMOS_GLOO_SOCKET_IFNAME"
"""What was set here, for this process and those that it starts."""


def use_interface_of(address: str) -> None:
    """Let all process groups of this process use the interface of an address; what the environment says stays.

    NCCL is left to itself where the address is loopback.

    Args:
        address: IP address of this machine.

    Raises:
        ReplicaError: `GLOO_SOCKET_IFNAME` names an interface that this machine has not.
    """
    known = interfaces()
    for name in _named():
        if name not in known:
            raise ReplicaError(
                f"{GLOO}={os.environ[GLOO]}: this machine has no interface {name!r}, it has {', '.join(known)}; name "
                f"one of them, or unset it: gloo then uses that of {address}"
            )
    if interface := interface_of(address):
        if GLOO not in os.environ or _is_ours():
            os.environ[GLOO] = os.environ[_OURS] = interface
        if not is_loopback(address):  # on one host NCCL finds its way
            # Without "=", it would take every interface whose name begins so.
            os.environ.setdefault(NCCL, f"={interface}")


def gloo_devices(address: str) -> list[Any]:
    """What gloo connects through: each interface that somebody named in `GLOO_SOCKET_IFNAME`, else an address.

    Raises:
        RuntimeError: There is no such interface, or it has no address.
    """
    if named := _named():
        return [ProcessGroupGloo.create_device(interface=name) for name in named]
    return [ProcessGroupGloo.create_device(hostname=address)]


def _is_ours() -> bool:
    """Whether the environment names the interface that `use_interface_of` chose."""
    return os.environ.get(_OURS, "") == os.environ.get(GLOO)


def _named() -> list[str]:
    """The interfaces that somebody chose."""
    return [] if _is_ours() else [name for name in os.environ.get(GLOO, "").split(",") if name]
