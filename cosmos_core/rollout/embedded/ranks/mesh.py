"""The process group of an engine's ranks, and the mesh that a model is told of."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from datetime import timedelta
from typing import Final

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from cosmos_core.errors import EngineError
from cosmos_core.protocols import Axis

HOST: Final = "127.0.0.1"
_INTERFACE: Final = "lo"
_GLOO_INTERFACE: Final = "GLOO_SOCKET_IFNAME"
_COLLECTIVE_TIMEOUT_S: Final = 300.0
"""A last resort: a rank that ended is noticed by its closed sockets."""
_JOIN_TIMEOUT_S: Final = 60.0


class TensorMesh:
    """Ranks along `tp`, which alone is greater than one (see `protocols.Mesh`)."""

    def __init__(self, rank: int, mesh: DeviceMesh) -> None:
        self._rank: Final = rank
        self._mesh: Final = mesh

    @property
    def rank(self) -> int:
        """This process's place."""
        return self._rank

    @property
    def world_size(self) -> int:
        """Ranks of the engine."""
        return int(self._mesh.size())

    def size(self, axis: Axis) -> int:
        """Ranks along an axis."""
        return self.world_size if axis == "tp" else 1

    def place(self, axis: Axis) -> int:
        """This process's place on an axis."""
        return self._rank if axis == "tp" else 0

    def group(self, axis: Axis) -> dist.ProcessGroup:
        """The ranks that differ from this one on this axis only."""
        return self.axis(axis).get_group()

    def axis(self, axis: Axis) -> DeviceMesh:
        """The 1-D device mesh of `tp`."""
        assert axis == "tp", f"an engine's ranks have no {axis} axis"
        return self._mesh["tp"]

    @property
    def weights(self) -> DeviceMesh:
        """One rank: nothing is sharded over data."""
        return self._mesh["fsdp"]

    @property
    def expert_weights(self) -> DeviceMesh:
        """Experts are not spread."""
        raise AssertionError("an engine's ranks have no ep axis")


def device_of(kind: str, rank: int) -> torch.device:
    """Where a rank computes: on a GPU of its own, if on any."""
    return torch.device(kind, rank) if kind == "cuda" else torch.device(kind)


def check_devices(kind: str, size: int) -> None:
    """Raise EngineError if the ranks would have to share a GPU."""
    if kind == "cuda" and torch.cuda.device_count() < size:
        raise EngineError(
            f"rollout.mesh.tp: {size} ranks need a GPU each, and this process sees {torch.cuda.device_count()}; use a "
            "smaller tp, or rollout.device = 'cpu'"
        )


def host_store() -> TCPStore:
    """Where the ranks meet, on this machine alone.

    Raises:
        EngineError: This process has a process group already.
    """
    _check_free()
    # Left to itself, torch listens on every address of the machine.
    listening = socket.create_server((HOST, 0))
    return TCPStore(
        HOST,
        listening.getsockname()[1],
        None,
        is_master=True,
        timeout=timedelta(seconds=_JOIN_TIMEOUT_S),
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
    )


def reach_store(port: int) -> TCPStore:
    """The first rank's store."""
    return TCPStore(
        HOST, port, None, is_master=False, timeout=timedelta(seconds=_JOIN_TIMEOUT_S), wait_for_workers=False
    )


def join(store: TCPStore, *, rank: int, size: int, device: torch.device) -> TensorMesh:
    """Become a rank; all of them call it.

    Raises:
        EngineError: This process has a process group already, which stays as it is.
        RuntimeError: Another rank did not come; this process has no group then.
    """
    _check_free()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    with contextlib.ExitStack() as undo, _on_this_machine():
        undo.callback(leave)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            store=store,
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=_COLLECTIVE_TIMEOUT_S),
        )
        mesh = TensorMesh(rank, init_device_mesh(device.type, (1, size), mesh_dim_names=("fsdp", "tp")))
        undo.pop_all()
        return mesh


def leave() -> None:
    """Be a rank no more, for who has joined. Idempotent."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _check_free() -> None:
    if dist.is_initialized():
        raise EngineError(
            "rollout.mesh.tp: another engine of this process, or something else, has a torch.distributed process "
            "group; an engine of several ranks needs a process of its own"
        )


@contextlib.contextmanager
def _on_this_machine() -> Iterator[None]:
    """Let gloo use the loopback interface: left to itself, it uses that of the machine's name."""
    before = os.environ.get(_GLOO_INTERFACE)
    os.environ[_GLOO_INTERFACE] = _INTERFACE
    try:
        yield
    finally:
        if before is None:
            del os.environ[_GLOO_INTERFACE]
        else:
            os.environ[_GLOO_INTERFACE] = before
