"""Messages between the processes of a replica beside training, in a process group of their own.

Collectives of one group must be called in one order by all of its processes. Checkpoints and publications run beside
training, so each has a group, used by one thread. Messages are of any length; collectives take tensors of one length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

import torch
import torch.distributed as dist

from cosmos_core.errors import TransportError

SMALL_BYTES: Final = 1024
"""Messages up to this size are exchanged in one round."""

_HEAD: Final = 8


def all_gathered(data: bytes, gather: Callable[[bytearray], list[bytes]]) -> list[bytes]:
    """Give each process's bytes to every process, in the order of `gather`."""
    first = gather(_framed(data[:SMALL_BYTES], len(data), SMALL_BYTES))
    sizes = [int.from_bytes(part[:_HEAD], "little") for part in first]
    longest = max(sizes)
    parts = first if longest <= SMALL_BYTES else gather(_framed(data, len(data), longest))
    return [part[_HEAD : _HEAD + size] for part, size in zip(parts, sizes, strict=True)]


def broadcasted(data: bytes, broadcast: Callable[[bytearray], bytes]) -> bytes:
    """Give the bytes of the process that `broadcast` starts from to every process.

    Args:
        data: Of that process; of the others ignored, and not sent.
        broadcast: Overwrites a buffer, as long on each process, with that process's.
    """
    first = broadcast(_framed(data[:SMALL_BYTES], len(data), SMALL_BYTES))
    size = int.from_bytes(first[:_HEAD], "little")
    # Elsewhere than where the bytes come from, the frame only makes room.
    whole = first if size <= SMALL_BYTES else broadcast(_framed(data[:size], size, size))
    return whole[_HEAD : _HEAD + size]


def _framed(data: bytes, size: int, room: int) -> bytearray:
    """The whole message's size in 8 bytes, then what there is of it, padded to `room`."""
    return bytearray(size.to_bytes(_HEAD, "little") + data.ljust(room, b"\0"))


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
        """Tell whether this process speaks for the replica."""
        return self.rank == 0

    def exchange(self, said: bytes) -> Sequence[bytes]:
        """The messages of all processes, in the order of ranks; all of them call it.

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

    def lead(
        self, work: Callable[[], None], words: Callable[[Exception], str], pieces: Iterable[object] = ()
    ) -> tuple[str, Exception | None]:
        """Let the first process work; all hear of its failure in `words`, empty if there is none, and it the error.

        `pieces`, of which the work may take, are made by all processes together, one by one.
        """
        failure: Exception | None = None
        try:
            if self.is_leader:
                work()
        except Exception as error:  # noqa: BLE001 - the others wait, and shall hear of it, whatever it is
            failure = error
        # What is not taken is made all the same: a process that still sends would never end.
        for _ in pieces:
            pass
        # Nobody goes on before the work is done.
        return self.exchange(b"" if failure is None else words(failure).encode())[0].decode(), failure


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
