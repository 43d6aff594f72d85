"""The process groups of torch's that gradient groups are made of, outside its default group."""

from __future__ import annotations

import ctypes
from datetime import timedelta
from typing import Any, Final, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroupGloo  # type: ignore[attr-defined]

from cosmos_core.policy.processes.interfaces import gloo_devices

COLLECTIVE_TIMEOUT_S: Final = 1800.0
"""A last resort: a lost member is noticed by its closed sockets, or by a newer generation."""

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
        timeout_s: Longest wait for a member to connect. What the group does later may take longer.

    Raises:
        RuntimeError: One did not, or the interface is none.
    """
    timeout = timedelta(seconds=COLLECTIVE_TIMEOUT_S)
    if device.type == "cuda":
        nccl = dist.ProcessGroupNCCL.Options()
        nccl._timeout = timeout  # noqa: SLF001 - the options have no public setter
        return dist.ProcessGroupNCCL(store, rank, size, nccl)
    gloo: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # noqa: SLF001 - as torch itself makes them
    gloo._devices = gloo_devices(address)  # noqa: SLF001
    gloo._threads = 2 * len(gloo._devices)  # noqa: SLF001 - as torch's own groups have
    # All members are there, but one may turn away before it connects, and nothing can interrupt the others then.
    gloo._timeout = timedelta(seconds=timeout_s)  # noqa: SLF001
    group = ProcessGroupGloo(store, rank, size, gloo)
    group.set_timeout(timeout)
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
