"""What the processes of a replica tell one another beside training: a group of its own, for one background thread.

Collectives of one group must be called in one order by all of its processes. Checkpoints and publications run beside
training, so each has a group of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
import torch.distributed as dist

from cosmos_core.errors import TransportError
from cosmos_core.models.parallel.frames import all_gathered


class Channel:
    """A line between the processes of a replica, used by one thread at a time.

    Args:
        group: Of all of them, for tensors on the CPU (gloo); None for a replica of one process.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group: Final = group
        self.rank: Final = 0 if group is None else dist.get_rank(group)
        self.size: Final = 1 if group is None else dist.get_world_size(group)

    @property
    def is_leader(self) -> bool:
        """Whether this process speaks for the replica."""
        return self.rank == 0

    def exchange(self, said: bytes) -> Sequence[bytes]:
        """What each process said, in the order of ranks; all of them call it.

        Raises:
            TransportError: A process is gone.
        """
        if self.group is None:
            return [said]
        try:
            return all_gathered(said, lambda buffer: gathered(buffer, self.size, self.group))
        except RuntimeError as error:
            reason = str(error).strip().partition("\n")[0]
            raise TransportError(f"a process of this replica is gone: {reason}") from error


def gathered(buffer: bytearray, size: int, group: dist.ProcessGroup | None = None) -> list[bytes]:
    """The buffers, of one length, of the `size` processes of a group (the default one if None), in rank order."""
    own = torch.frombuffer(buffer, dtype=torch.uint8)
    found = [torch.empty_like(own) for _ in range(size)]
    dist.all_gather(found, own, group=group)
    return [tensor.numpy().tobytes() for tensor in found]


def open_channel() -> Channel:
    """A channel between all processes of the default group, if there are several; all of them call it."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return Channel()
    return Channel(dist.new_group(backend="gloo"))
