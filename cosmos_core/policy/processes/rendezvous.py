"""Lets the members of a generation meet and become a gradient group.

Whatever waits here can be interrupted: a member that is awaited may be gone, and a newer generation on its way. A
store whose machine is cut off does not answer for many minutes, and nothing interrupts a call of torch's that waits for
it: so a thread makes these calls, and is left behind if need be.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import wait
from datetime import timedelta
from typing import Final

import attrs
import torch
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from cosmos_core.policy.processes.backend import Collectives, connect, keep_for_good
from cosmos_core.policy.processes.group import GradientGroup, GradientGroupError, solo
from cosmos_core.policy.processes.world import World, single_world
from cosmos_core.replica.activity import Activity
from cosmos_core.replica.health_leader import listen
from cosmos_core.threads import begin
from cosmos_core.transport.addresses import in_url

FORM_TIMEOUT_S: Final = 60.0
"""Time for all members to appear; the controller has seen each of them alive."""


class GroupStore:
    """The rendezvous of the generations of which its replica is the first member.

    Args:
        address: IP address of this machine to listen on, at which the other members reach it.

    Attributes:
        shared: The store itself; the processes of this replica meet there, too.

    Raises:
        TransportError: The address cannot be listened on.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        # Left to itself, torch listens on every address of the machine.
        listening = listen(address)
        self.shared: Final = TCPStore(
            address,
            listening.getsockname()[1],
            None,
            is_master=True,
            timeout=timedelta(seconds=FORM_TIMEOUT_S),
            wait_for_workers=False,
            master_listen_fd=listening.detach(),
        )

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return int(self.shared.port)

    @property
    def endpoint(self) -> str:
        """`tcp://HOST:PORT`, for `Hello.endpoints["store"]`."""
        return f"tcp://{in_url(self._address)}:{self.port}"


_REACH_S: Final = 1.0
_PAUSE_S: Final = 0.05
_POLL_S: Final = 0.01
_LAST_WORDS_S: Final = 1.0
"""Time in which a thread that is told to stop says why, unless it is stuck."""


def form_group(
    *,
    generation: int,
    rank: int,
    size: int,
    store: str,
    address: str,
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
        address: IP address of this machine for the group's own connections.
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
    entry = _Entry(generation=generation, rank=rank, size=size, store=store, timeout_s=timeout_s)
    with activity.doing(f"waiting for the members of generation {generation}", waits=True):
        try:
            backend = _waited(entry, lambda: entry.joined(world.rank, address, device), interrupted)
        except GradientGroupError as error:
            problem = error
    if not world.agree(problem is None, interrupted):
        keep_for_good(backend)
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


def _waited(entry: _Entry, join: Callable[[], Collectives], interrupted: Callable[[], bool]) -> Collectives:
    """Join on a thread, and wait for it.

    Raises:
        GradientGroupError: It could not; or it is stuck, and left behind.
    """
    joined = begin(join, f"generation-{entry.generation}")
    # To be reached and met, and to connect.
    deadline = time.monotonic() + 2 * entry.timeout_s + _LAST_WORDS_S
    while not joined.done() and not entry.is_off.is_set():
        wait([joined], _POLL_S)
        if interrupted() or time.monotonic() > deadline:
            entry.is_off.set()
            wait([joined], _LAST_WORDS_S)
    if not joined.done():
        raise entry.error(f"given up while {entry.store} or a member did not answer: it is cut off, or stopped")
    return joined.result()


@attrs.frozen(kw_only=True, eq=False)
class _Entry:
    """One process's way into a group.

    Attributes:
        is_off: Set when waiting has become pointless; the others are those of `form_group`.
    """

    generation: int
    rank: int
    size: int
    store: str
    timeout_s: float
    is_off: threading.Event = attrs.field(factory=threading.Event)

    def joined(self, place: int, address: str, device: torch.device) -> Collectives:
        """Meet the processes that have the same place in the other replicas, and connect with them."""
        host, _, port = self.store.removeprefix("tcp://").rpartition(":")
        timeout, deadline = timedelta(seconds=self.timeout_s), time.monotonic() + self.timeout_s
        try:
            self._reach(host.strip("[]"), int(port), deadline)
            # RuntimeError is what torch's stores and groups raise on every kind of failure.
            met = TCPStore(host.strip("[]"), int(port), None, is_master=False, timeout=timeout, wait_for_workers=False)
            own = PrefixStore(f"generation-{self.generation}/rank-{place}", met)
            self._meet(own, deadline)
            return connect(
                own, rank=self.rank, size=self.size, address=address, device=device, timeout_s=self.timeout_s
            )
        except (RuntimeError, ValueError) as error:
            reason = str(error).strip().split("\n", 1)[0]
            raise self.error(f"cannot join at {self.store} from {address}: {reason}") from error

    def _reach(self, host: str, port: int, deadline: float) -> None:
        """Wait until a store listens: its member may be gone, and the store's own attempts cannot be interrupted."""
        while True:
            try:
                with socket.create_connection((host, port), _REACH_S):
                    return
            except OSError as error:
                if self.is_off.is_set():
                    raise self.error(f"interrupted before {host}:{port} listened") from error
                if time.monotonic() > deadline:
                    raise self.error(
                        f"cannot join at {self.store}: it is not reached after {self.timeout_s:g} s ({error}): its "
                        "process has ended, or a firewall between the hosts closes its port"
                    ) from error
            time.sleep(_PAUSE_S)

    def _meet(self, store: PrefixStore, deadline: float) -> None:
        """Wait until every member is there: a process group's own rendezvous cannot be interrupted."""
        store.set(f"here/{self.rank}", "1")
        keys = [f"here/{member}" for member in range(self.size)]
        while not store.check(keys):
            if self.is_off.is_set():
                raise self.error("interrupted while members were awaited")
            if time.monotonic() > deadline:
                absent = [member for member, key in enumerate(keys) if not store.check([key])]
                raise self.error(f"members {absent} did not appear in {self.timeout_s:g} s")
            time.sleep(_POLL_S)

    def error(self, words: str) -> GradientGroupError:
        """The error that says why this process is not in the group."""
        return GradientGroupError(f"generation {self.generation}: {words}")
