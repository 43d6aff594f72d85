"""The processes of one policy replica, and what they tell each other besides tensors of the model.

Every method is called by all processes, in the same order, on the main thread. A process that fails ends the others
through the health channel (`cosmos_core.replica.health_channel`), so none of these waits can last for ever.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, TypeAlias

import torch
import torch.distributed as dist

from cosmos_core.models.parallel.channel import all_gathered, broadcasted, gathered
from cosmos_core.policy.mesh.mesh import single
from cosmos_core.protocols.layout import Mesh

LEADER: Final = 0
"""Rank of the process that speaks with the controller."""

Waiting: TypeAlias = Callable[[], object]

_MAX_PAUSE_S: Final = 0.02


def _nothing() -> None:
    """Nothing to do while waiting."""


class World:
    """A replica's processes; of a replica of one process, nothing here needs a process group.

    Args:
        mesh: The processes along their axes; those of the default process group.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.mesh: Final = mesh
        self.rank: Final = mesh.rank
        self.size: Final = mesh.world_size

    @property
    def is_leader(self) -> bool:
        """True on the process that speaks for the replica."""
        return self.rank == LEADER

    def agree(self, is_good: bool, waiting: Waiting = _nothing) -> bool:
        """Ask all processes: true if it is good on every one.

        Args:
            is_good: Whether it is on this one.
            waiting: Called again and again while others are waited for.
        """
        if self.size == 1:
            return is_good
        flag = torch.tensor([int(is_good)], dtype=torch.int32)
        _polled(dist.all_reduce(flag, dist.ReduceOp.MIN, async_op=True), waiting)
        return bool(flag.item())

    def most(self, number: int) -> int:
        """The largest number of all processes."""
        if self.size == 1:
            return number
        largest = torch.tensor([number], dtype=torch.int64)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return int(largest.item())

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Add up a tensor over all processes, in place; the tensor."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def share(self, data: bytes) -> bytes:
        """The leader's bytes, on every process; those of the others are ignored."""
        if self.size == 1:
            return data

        def broadcast(buffer: bytearray) -> bytes:
            tensor = torch.frombuffer(buffer, dtype=torch.uint8)
            dist.broadcast(tensor, LEADER)
            return tensor.numpy().tobytes()

        return broadcasted(data if self.is_leader else b"", broadcast)

    def exchange(self, data: bytes) -> list[bytes]:
        """Give each process's bytes to every process, in rank order."""
        if self.size == 1:
            return [data]
        return all_gathered(data, lambda buffer: gathered(buffer, self.size))


def single_world() -> World:
    """A replica of one process."""
    return World(single())


def _polled(work: dist.Work | None, waiting: Waiting) -> None:
    """Wait for a collective without giving up this thread to it."""
    assert work is not None, "every process of the world belongs to its default group"
    pause_s = 0.0
    while waiting is not _nothing and not work.is_completed():
        waiting()
        time.sleep(pause_s)
        pause_s = min(_MAX_PAUSE_S, pause_s + 0.0001)
    work.wait()
