"""Makes the process groups of torch's for gradient groups, outside its default group, on the right interface."""

from __future__ import annotations

import ctypes
import os
from datetime import timedelta
from typing import Any, Final, TypeAlias

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo  # type: ignore[attr-defined]

from cosmos_core.config.checks import is_loopback
from cosmos_core.errors import ReplicaError
from cosmos_core.transport.addresses import interface_of, interfaces
from cosmos_core.weights.process_group import LIMIT_S, nccl_group

GLOO: Final = "GLOO_SOCKET_IFNAME"
NCCL: Final = "NCCL_SOCKET_IFNAME"
_OURS: Final = "COSMOS_GLOO_SOCKET_IFNAME"
"""The interface that was chosen here, for this process and those that it starts."""


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
    """Devices for gloo: each interface that somebody named in `GLOO_SOCKET_IFNAME`, else an address.

    Raises:
        RuntimeError: There is no such interface, or it has no address.
    """
    if named := _named():
        return [ProcessGroupGloo.create_device(interface=name) for name in named]
    return [ProcessGroupGloo.create_device(hostname=address)]


def _is_ours() -> bool:
    """True if the environment names the interface that `use_interface_of` chose."""
    return os.environ.get(_OURS, "") == os.environ.get(GLOO)


def _named() -> list[str]:
    """The interfaces that somebody chose."""
    return [] if _is_ours() else [name for name in os.environ.get(GLOO, "").split(",") if name]


Collectives: TypeAlias = Any
"""ProcessGroupGloo or ProcessGroupNCCL: torch gives them no common public type."""


def connect(
    store: PrefixStore, *, rank: int, size: int, address: str, device: torch.device, timeout_s: float
) -> Collectives:
    """Build a process group; all of its members call it.

    Args:
        store: Of this group alone.
        rank: This process's place.
        size: Number of members.
        address: IP address of this machine.
        device: Where tensors are: gloo for the CPU, NCCL for CUDA.
        timeout_s: Longest wait for the members to appear, and again to connect. What the group does later may take
            longer.

    Raises:
        RuntimeError: One did not, or the interface is none.
    """
    if device.type == "cuda":
        return nccl_group(store, rank, size, device, timeout_s)
    gloo: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # noqa: SLF001 - as torch itself makes them
    gloo._devices = gloo_devices(address)  # noqa: SLF001
    gloo._threads = 2 * len(gloo._devices)  # noqa: SLF001 - as torch's own groups have
    # All members are there, but one may turn away before it connects, and nothing can interrupt the others then.
    gloo._timeout = timedelta(seconds=timeout_s)  # noqa: SLF001
    group = ProcessGroupGloo(store, rank, size, gloo)
    group.set_timeout(timedelta(seconds=LIMIT_S))
    return group


def give_up(backend: Collectives | None, device: torch.device) -> None:
    """Leave a group at once, whatever it is doing: its closed sockets tell the other members."""
    if backend is None:
        return
    if device.type == "cuda":
        # A kernel that waits for a lost member never ends, and whoever waits for the device would wait for it.
        backend.abort()
    keep_for_good(backend)


def keep_for_good(backend: Collectives | None) -> None:
    """Never destroy a group that was given up: that would wait for its collective, even as the process ends."""
    if backend is not None:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(backend))
