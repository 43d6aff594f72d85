"""The gradient group of a generation: the replicas that train a step together, and their collectives.

Each replica is its own world; the group is a process group built for one generation, outside `torch.distributed`'s
default group, so replicas come and go. Of replicas of several processes, those of equal rank form a group each. A
collective that fails on any of them, or that a newer generation makes pointless, raises `GradientGroupError` on every
process of the replica: the step's gradients are then partial and must be discarded.
"""

from __future__ import annotations

import ctypes
import socket
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, Final, TypeAlias

import msgspec
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore  # type: ignore[attr-defined]

from cosmos_core.errors import TrainingError, TransportError
from cosmos_core.policy.mesh.frames import all_gathered
from cosmos_core.policy.processes.world import World, single_world
from cosmos_core.replica.activity import Activity

FORM_TIMEOUT_S: Final = 60.0
"""Time for all members to appear; the controller has seen each of them alive."""
_REACH_S: Final = 1.0
COLLECTIVE_TIMEOUT_S: Final = 1800.0
"""A last resort: a lost member is noticed by its closed sockets, or by a newer generation."""

Collectives: TypeAlias = Any
"""ProcessGroupGloo or ProcessGroupNCCL: torch gives them no common public type."""


class GradientGroupError(TrainingError):
    """The gradient group could not be formed or broke."""


class GroupStore:
    """The rendezvous that each replica's leader hosts, for generations of which the replica is the first member.

    Args:
        bind: Address of this machine to listen on; 0.0.0.0 for all.

    Attributes:
        shared: The store itself; the processes of this replica meet there, too.

    Raises:
        TransportError: The address cannot be listened on.
    """

    def __init__(self, bind: str) -> None:
        self._host = host_of(bind)
        # Left to itself, torch listens on every address of the machine.
        listening = _listen("" if bind == "*" else bind)
        self.shared: Final = TCPStore(
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
    def port(self) -> int:
        """Where it listens."""
        return int(self.shared.port)

    @property
    def endpoint(self) -> str:
        """`tcp://HOST:PORT`, for `Hello.endpoints["store"]`."""
        return f"tcp://{self._host}:{self.port}"


class GradientGroup:
    """The members of one generation, in rank order. A group of one needs no network.

    All processes of a replica call each method, in the same order, and it succeeds on all or on none.

    Args:
        generation: Its number.
        rank: This replica's place.
        size: Number of members.
        world: The processes of this replica.
        backend: The process group; None for a group of one.
        device: Where the backend takes tensors.
        interrupted: Whether waiting has become pointless (a newer generation, the end of the process).
        activity: Told when this replica waits for others.
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
        world: World | None = None,
        activity: Activity | None = None,
    ) -> None:
        self.generation = generation
        self.rank = rank
        self.size = size
        self._world = single_world() if world is None else world
        self._activity = Activity() if activity is None else activity
        self._backend = backend
        self._interrupted = interrupted
        self._device = device

    def sum(self, tensor: torch.Tensor) -> None:
        """Add up a tensor over all members, in place.

        Raises:
            GradientGroupError: The group broke.
        """
        self._together(lambda: self._run(lambda backend: backend.allreduce([tensor])))

    def copy(self, tensors: Iterable[torch.Tensor], source: int) -> None:
        """Overwrite tensors with those of member `source`.

        Raises:
            GradientGroupError: The group broke.
        """
        options = dist.BroadcastOptions()
        options.rootRank = source

        def start(tensor: torch.Tensor) -> Callable[[Collectives], dist.Work]:
            return lambda backend: backend.broadcast([tensor], options)

        def copy_all() -> None:
            for tensor in tensors:
                self._run(start(tensor))

        self._together(copy_all)

    def exchange(self, data: bytes) -> list[bytes]:
        """Give the bytes of each member's leader to every process of every member, in rank order.

        Raises:
            GradientGroupError: The group broke.
        """
        answers = [data]

        def exchange() -> None:
            if self._world.is_leader:
                answers[:] = all_gathered(data, self._gather)

        self._together(exchange)
        if self._world.size == 1:
            return answers
        shared = self._world.share(msgspec.msgpack.encode(answers))
        return msgspec.msgpack.decode(shared, type=list[bytes])

    def close(self) -> None:
        """Leave the group."""
        self._backend = None

    def _together(self, work: Callable[[], None]) -> None:
        """Do what every process of the replica does with those of its rank elsewhere, and agree whether it worked.

        A rank whose own group is fine must not apply what another's could not reduce.
        """
        if self.size == 1:
            return
        problem: GradientGroupError | None = None
        waiting = f"waiting for the other members of generation {self.generation}"
        with self._activity.doing(waiting, waits=True):
            try:
                work()
            except GradientGroupError as error:
                problem = error
        # The leader goes on looking out for newer generations: a rank that still waits needs to be told. Once it has
        # been, it is this replica's own fault if it does not come back.
        with self._activity.doing(waiting, waits=problem is None):
            is_good = self._world.agree(problem is None, self._interrupted)
        if not is_good:
            self._give_up()
            raise problem or GradientGroupError(
                f"generation {self.generation}: a collective failed in another process of this replica"
            )

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
        backend, self._backend = self._backend, None
        if backend is not None and self._device.type == "cuda":
            # A kernel that waits for a lost member never ends, and whoever waits for the device would wait for it.
            backend.abort()
        _keep_for_good(backend)


def solo(generation: int = 0, world: World | None = None) -> GradientGroup:
    """A group of one."""
    cpu = torch.device("cpu")
    return GradientGroup(
        generation=generation, rank=0, size=1, backend=None, device=cpu, interrupted=lambda: False, world=world
    )


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
    world: World | None = None,
    activity: Activity | None = None,
) -> GradientGroup:
    """Meet the other members and build the process group; all processes of the replica call it.

    Args:
        generation: Number of the generation; each has its own names in the store, for each rank of a replica.
        rank: This replica's place.
        size: Number of members.
        store: `store` endpoint of member 0.
        host: Address of this machine for the group's own connections.
        device: Where gradients are: gloo for the CPU, NCCL for CUDA.
        interrupted: Whether waiting has become pointless.
        timeout_s: Longest wait for the other members.
        world: The processes of this replica.
        activity: Told when this replica waits for others.

    Raises:
        GradientGroupError: A member did not appear, or the process group could not be built, for any process.
    """
    world = single_world() if world is None else world
    if size == 1:
        return solo(generation, world)
    backend: Collectives | None = None
    problem: GradientGroupError | None = None
    activity = Activity() if activity is None else activity
    with activity.doing(f"waiting for the members of generation {generation}", waits=True):
        try:
            backend = _joined(generation, rank, size, store, host, device, interrupted, timeout_s, world.rank)
        except GradientGroupError as error:
            problem = error
    if not world.agree(problem is None, interrupted):
        _keep_for_good(backend)
        raise problem or GradientGroupError(
            f"generation {generation}: another process of this replica could not join at {store}"
        )
    return GradientGroup(
        generation=generation,
        rank=rank,
        size=size,
        backend=backend,
        device=device,
        interrupted=interrupted,
        world=world,
        activity=activity,
    )


def _joined(  # noqa: PLR0917
    generation: int,
    rank: int,
    size: int,
    store: str,
    host: str,
    device: torch.device,
    interrupted: Callable[[], bool],
    timeout_s: float,
    place: int,
) -> Collectives:
    address, _, port = store.removeprefix("tcp://").rpartition(":")
    try:
        _reach(address, int(port), generation, interrupted, timeout_s)
        # RuntimeError is what torch's stores and groups raise on every kind of failure.
        shared = PrefixStore(
            f"generation-{generation}/rank-{place}",
            TCPStore(
                address, int(port), None, is_master=False, timeout=timedelta(seconds=timeout_s), wait_for_workers=False
            ),
        )
        _meet(shared, rank, size, generation, interrupted, timeout_s)
        return _build(shared, rank, size, host, device, timeout_s)
    except (RuntimeError, ValueError) as error:
        reason = str(error).strip().split("\n", 1)[0]
        raise GradientGroupError(f"generation {generation}: cannot join at {store}: {reason}") from error


def _reach(host: str, port: int, generation: int, interrupted: Callable[[], bool], timeout_s: float) -> None:
    """Wait until a store listens: its member may be gone, and the store's own attempts cannot be interrupted."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            with socket.create_connection((host.strip("[]"), port), _REACH_S):
                return
        except OSError as error:
            if interrupted():
                raise GradientGroupError(
                    f"generation {generation}: interrupted before {host}:{port} listened"
                ) from error
            if time.monotonic() > deadline:
                raise GradientGroupError(
                    f"generation {generation}: cannot join at tcp://{host}:{port}: nobody listens, after {timeout_s:g} "
                    f"s ({error})"
                ) from error
        time.sleep(0.05)


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


def _build(  # noqa: PLR0917
    store: PrefixStore, rank: int, size: int, host: str, device: torch.device, timeout_s: float
) -> Collectives:
    timeout = timedelta(seconds=COLLECTIVE_TIMEOUT_S)
    if device.type == "cuda":
        nccl = dist.ProcessGroupNCCL.Options()
        nccl._timeout = timeout  # noqa: SLF001 - the options have no public setter
        return dist.ProcessGroupNCCL(store, rank, size, nccl)
    gloo: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # noqa: SLF001 - as torch itself makes them
    gloo._devices = [ProcessGroupGloo.create_device(hostname=host)]  # noqa: SLF001
    # All members are there, but one may turn away before it connects, and nothing can interrupt the others then.
    gloo._timeout = timedelta(seconds=timeout_s)  # noqa: SLF001
    group = ProcessGroupGloo(store, rank, size, gloo)
    group.set_timeout(timeout)
    return group


def _keep_for_good(backend: Collectives | None) -> None:
    """Never destroy a group that was given up: that would wait for its collective, even as the process ends."""
    if backend is not None:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(backend))


def _listen(bind: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in bind else socket.AF_INET
    try:
        return socket.create_server((bind, 0), family=family, backlog=1024)
    except OSError as error:
        raise TransportError(
            f"cannot listen on {bind} ({error.strerror or error}); set control.bind to an address of this machine"
        ) from error


def host_of(bind: str) -> str:
    """The address that others reach this machine at, which listens on `bind`."""
    is_wild = bind in {"0.0.0.0", "::", "*"}  # noqa: S104 - compared, not bound
    return own_address() if is_wild else bind


def own_address() -> str:
    """This machine's name, as other machines can resolve it."""
    return socket.gethostname()
