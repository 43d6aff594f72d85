"""The gradient group of a generation: the replicas that train a step together, and their collectives.

Each replica is its own world; the group is a process group built for one generation, outside `torch.distributed`'s
default group, so replicas come and go. A collective that fails, or that a newer generation makes pointless, raises
`GradientGroupError`: the step's gradients are then partial and must be discarded.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore  # type: ignore[attr-defined]

from cosmos_core.errors import TrainingError, TransportError

FORM_TIMEOUT_S: Final = 60.0
"""Time for all members to appear; the controller has seen each of them alive."""
COLLECTIVE_TIMEOUT_S: Final = 1800.0
"""A last resort: a lost member is noticed by its closed sockets, or by a newer generation."""

SMALL_BYTES: Final = 1024
"""Messages up to this size are exchanged in one round."""

Collectives: TypeAlias = Any
"""ProcessGroupGloo or ProcessGroupNCCL: torch gives them no common public type."""

_PARKED: Final[list[object]] = []
"""Groups that were given up in the middle of a collective: destroying one would wait for it."""


class GradientGroupError(TrainingError):
    """The gradient group could not be formed or broke."""


class GroupStore:
    """The rendezvous that each replica hosts, for generations of which it is the first member.

    Args:
        bind: Address of this machine to listen on; 0.0.0.0 for all.

    Raises:
        TransportError: The address cannot be listened on.
    """

    def __init__(self, bind: str) -> None:
        is_wild = bind in {"0.0.0.0", "::", "*"}  # noqa: S104 - compared, not bound
        self._host = own_address() if is_wild else bind
        # Left to itself, torch listens on every address of the machine.
        listening = _listen("" if bind == "*" else bind)
        self._store = TCPStore(
            self._host,
            listening.getsockname()[1],
            None,
            is_master=True,
            timeout=timedelta(seconds=FORM_TIMEOUT_S),
            wait_for_workers=False,
            master_listen_fd=listening.detach(),
        )

    @property
    def host(self) -> str:
        """The address that other members reach this machine at."""
        return self._host

    @property
    def endpoint(self) -> str:
        """`tcp://HOST:PORT`, for `Hello.endpoints["store"]`."""
        return f"tcp://{self._host}:{self._store.port}"


class GradientGroup:
    """The members of one generation, in rank order. A group of one needs no network.

    Args:
        generation: Its number.
        rank: This replica's place.
        size: Number of members.
        backend: The process group; None for a group of one.
        device: Where the backend takes tensors.
        interrupted: Whether waiting has become pointless (a newer generation, the end of the process).
    """

    def __init__(
        self,
        *,
        generation: int,
        rank: int,
        size: int,
        backend: Collectives | None,
        device: torch.device,
        interrupted: Callable[[], bool],
    ) -> None:
        self.generation = generation
        self.rank = rank
        self.size = size
        self._backend = backend
        self._interrupted = interrupted
        self._device = device

    def sum(self, tensor: torch.Tensor) -> None:
        """Add up a tensor over all members, in place.

        Raises:
            GradientGroupError: The group broke.
        """
        if self.size > 1:
            self._run(lambda backend: backend.allreduce([tensor]))

    def copy(self, tensor: torch.Tensor, source: int) -> None:
        """Overwrite a tensor with the one of member `source`.

        Raises:
            GradientGroupError: The group broke.
        """
        if self.size > 1:
            options = dist.BroadcastOptions()
            options.rootRank = source
            self._run(lambda backend: backend.broadcast([tensor], options))

    def exchange(self, data: bytes) -> list[bytes]:
        """Give each member's bytes to every member, in rank order.

        Raises:
            GradientGroupError: The group broke.
        """
        if self.size == 1:
            return [data]
        first = self._gather(_framed(data[:SMALL_BYTES], len(data), SMALL_BYTES))
        sizes = [int.from_bytes(part[:8], "little") for part in first]
        longest = max(sizes)
        parts = first if longest <= SMALL_BYTES else self._gather(_framed(data, len(data), longest))
        return [part[8 : 8 + size] for part, size in zip(parts, sizes, strict=True)]

    def close(self) -> None:
        """Leave the group."""
        self._backend = None

    def _gather(self, data: bytearray) -> list[bytes]:
        """Bytes of equal size from every member, in rank order."""
        tensor = torch.frombuffer(data, dtype=torch.uint8).to(self._device)
        outputs = [torch.empty_like(tensor) for _ in range(self.size)]
        self._run(lambda backend: backend.allgather([outputs], [tensor]))
        return [output.cpu().numpy().tobytes() for output in outputs]

    def _run(self, start: Callable[[Collectives], dist.Work]) -> None:
        """Wait for a collective by polling: nothing else can be interrupted when a member dies (measured)."""
        if self._backend is None:
            raise GradientGroupError(f"generation {self.generation}: the group is closed")
        try:
            work = start(self._backend)
            pause_s = 0.0
            while not work.is_completed():
                if pause_s > 0.01 and self._interrupted():
                    self._give_up()
                    raise GradientGroupError(f"generation {self.generation}: interrupted in a collective")
                time.sleep(pause_s)
                pause_s = min(0.02, pause_s + 0.0001)
            work.wait()
        except RuntimeError as error:
            self._give_up()
            reason = str(error).strip().split("\n", 1)[0]
            raise GradientGroupError(f"generation {self.generation}: a collective failed: {reason}") from error

    def _give_up(self) -> None:
        """Leave at once: the closed sockets tell the other members."""
        _PARKED.append(self._backend)
        self._backend = None


def _framed(data: bytes, size: int, room: int) -> bytearray:
    """The whole message's size in 8 bytes, then what there is of it, padded to `room`."""
    return bytearray(size.to_bytes(8, "little") + data.ljust(room, b"\0"))


def solo(generation: int = 0) -> GradientGroup:
    """A group of one."""
    cpu = torch.device("cpu")
    return GradientGroup(generation=generation, rank=0, size=1, backend=None, device=cpu, interrupted=lambda: False)


def form_group(
    *,
    generation: int,
    rank: int,
    size: int,
    store: str,
    host: str,
    device: torch.device,
    interrupted: Callable[[], bool],
    timeout_s: float = FORM_TIMEOUT_S,
) -> GradientGroup:
    """Meet the other members and build the process group.

    Args:
        generation: Number of the generation; each has its own names in the store.
        rank: This replica's place.
        size: Number of members.
        store: `store` endpoint of member 0.
        host: Address of this machine for the group's own connections.
        device: Where gradients are: gloo for the CPU, NCCL for CUDA.
        interrupted: Whether waiting has become pointless.
        timeout_s: Longest wait for the other members.

    Raises:
        GradientGroupError: A member did not appear, or the process group could not be built.
    """
    if size == 1:
        return solo(generation)
    address, _, port = store.removeprefix("tcp://").rpartition(":")
    try:
        # RuntimeError is what torch's stores and groups raise on every kind of failure.
        shared = PrefixStore(
            f"generation-{generation}",
            TCPStore(
                address, int(port), None, is_master=False, timeout=timedelta(seconds=timeout_s), wait_for_workers=False
            ),
        )
        _meet(shared, rank, size, generation, interrupted, timeout_s)
        backend = _build(shared, rank, size, host, device)
    except (RuntimeError, ValueError) as error:
        reason = str(error).strip().split("\n", 1)[0]
        raise GradientGroupError(f"generation {generation}: cannot join at {store}: {reason}") from error
    return GradientGroup(
        generation=generation, rank=rank, size=size, backend=backend, device=device, interrupted=interrupted
    )


def _meet(  # noqa: PLR0917
    store: PrefixStore, rank: int, size: int, generation: int, interrupted: Callable[[], bool], timeout_s: float
) -> None:
    """Wait until every member is there: a process group's own rendezvous cannot be interrupted."""
    store.set(f"here/{rank}", "1")
    keys = [f"here/{member}" for member in range(size)]
    deadline = time.monotonic() + timeout_s
    while not store.check(keys):
        if interrupted():
            raise GradientGroupError(f"generation {generation}: interrupted while members were awaited")
        if time.monotonic() > deadline:
            absent = [member for member in range(size) if not store.check([keys[member]])]
            raise GradientGroupError(f"generation {generation}: members {absent} did not appear in {timeout_s:g} s")
        time.sleep(0.01)


def _build(store: PrefixStore, rank: int, size: int, host: str, device: torch.device) -> Collectives:
    timeout = timedelta(seconds=COLLECTIVE_TIMEOUT_S)
    if device.type == "cuda":
        nccl = dist.ProcessGroupNCCL.Options()
        nccl._timeout = timeout  # noqa: SLF001 - the options have no public setter
        return dist.ProcessGroupNCCL(store, rank, size, nccl)
    gloo: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # noqa: SLF001 - as torch itself makes them
    gloo._devices = [ProcessGroupGloo.create_device(hostname=host)]  # noqa: SLF001
    gloo._timeout = timeout  # noqa: SLF001
    return ProcessGroupGloo(store, rank, size, gloo)


def _listen(bind: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in bind else socket.AF_INET
    try:
        return socket.create_server((bind, 0), family=family, backlog=1024)
    except OSError as error:
        raise TransportError(
            f"cannot listen on {bind} ({error.strerror or error}); set control.bind to an address of this machine"
        ) from error


def own_address() -> str:
    """This machine's name, as other machines can resolve it."""
    return socket.gethostname()
