"""Makes one replica of its processes: they find each other by a file, watch each other, and form a mesh."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import attrs
import msgspec
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from cosmos_core.config.mesh import world_size
from cosmos_core.errors import ReplicaError
from cosmos_core.files import replace_file
from cosmos_core.policy.mesh.mesh import form_mesh
from cosmos_core.policy.processes.backend import use_interface_of
from cosmos_core.policy.processes.rendezvous import GroupStore
from cosmos_core.policy.processes.world import World, single_world
from cosmos_core.replica.health_channel import FollowerChannel, HealthChannel
from cosmos_core.replica.health_leader import LeaderChannel
from cosmos_core.replica.process import RoleArgs
from cosmos_core.weights.process_group import LIMIT_S


@attrs.frozen(kw_only=True)
class Rendezvous:
    """The addresses at which a leader waits for its followers.

    A file of an earlier session is ignored. The token is what followers say to its health channel: a secret, as the
    file is.
    """

    session: str
    token: str = attrs.field(repr=False)
    host: str
    health_port: int
    store: int


def rendezvous_file(run: Path, replica: str) -> Path:
    """The file to which the leader of a replica writes its `Rendezvous`."""
    return run / "replicas" / f"{replica}.json"


def announce(path: Path, rendezvous: Rendezvous) -> None:
    """Write the file, for its owner's eyes alone, whole or not at all."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, msgspec.json.encode(rendezvous), mode=0o600)
    except OSError as error:
        raise ReplicaError(f"{path} cannot be written, where followers look for their leader: {error}") from error


def find(path: Path, session: str, timeout_s: float, interrupted: Callable[[], bool]) -> Rendezvous:
    """Wait for the file of this start of the run."""
    deadline = time.monotonic() + timeout_s
    state = "there is none"
    while not interrupted():
        try:
            found = msgspec.json.decode(path.read_bytes(), type=Rendezvous)
        except FileNotFoundError:
            state = "there is none"
        except (OSError, msgspec.DecodeError) as error:
            raise ReplicaError(f"{path}: cannot be read: {error}") from error
        else:
            if found.session == session:
                return found
            state = "the one that is there is of an earlier start"
        if time.monotonic() > deadline:
            raise ReplicaError(
                f"{path}: the leader has not written it within {timeout_s:g} s ({state}); see "
                f"logs/{path.stem}.log for why it did not start"
            )
        time.sleep(0.02)
    raise ReplicaError(f"{path}: told to stop while the leader was awaited")


@attrs.frozen(kw_only=True, eq=False)
class Bond:
    """A process's connections to the others, before it has a world.

    Attributes:
        line: Of this process.
        address: IP address of this machine, for process groups.
        size: Processes of the replica.
        rank: This one's.
        store: Where other replicas' members, and the followers, meet this leader; None on a follower.
        shared: The leader's store.
    """

    line: HealthChannel
    address: str
    size: int
    rank: int
    store: GroupStore | None
    shared: TCPStore


def bond(args: RoleArgs) -> Bond:
    """Find the other processes of this replica; the line ends this process with them from here on.

    Raises:
        ReplicaError: They cannot be found, or the environment names an interface that this machine has not.
        TransportError: This machine's address cannot be told, or not be listened on.
    """
    recipe = args.job.recipe
    size, timeout_s = world_size(recipe.policy.mesh), recipe.control.join_timeout_s
    if size > 1 and not (args.session and 0 <= args.rank < size):
        raise ReplicaError(
            f"{args.name}: policy.mesh makes a replica {size} processes; each needs --rank 0 to {size - 1} and the "
            f"same --session, got --rank {args.rank} --session {args.session!r} (`cosmos run` starts them all)"
        )
    use_interface_of(args.address)
    if args.rank == 0:
        store = GroupStore(args.address)
        line = _lead(args, size, store) if size > 1 else HealthChannel()
        return Bond(line=line, address=args.address, size=size, rank=0, store=store, shared=store.shared)
    path = rendezvous_file(args.run_dir, args.replica)
    rendezvous = find(path, args.session, timeout_s, args.stop.is_set)
    follower = FollowerChannel(
        name=args.replica,
        rank=args.rank,
        token=rendezvous.token,
        address=(rendezvous.host, rendezvous.health_port),
        end=args.end,
        patience_s=recipe.control.lost_after_s,
    )
    return Bond(
        line=follower,
        address=args.address,
        size=size,
        rank=args.rank,
        store=None,
        shared=_reach(rendezvous, args.replica, timeout_s),
    )


def form_world(args: RoleArgs, bound: Bond, device: torch.device) -> World:
    """Wait for the other processes, and arrange all of them as the recipe's mesh says.

    Raises:
        ConfigError: The mesh's sizes do not fit together.
        ReplicaError: Some did not appear.
    """
    if bound.size == 1:
        return single_world()
    if isinstance(bound.line, LeaderChannel):
        bound.line.meet(args.job.recipe.control.join_timeout_s, args.stop.is_set)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=PrefixStore("world", bound.shared),
        rank=bound.rank,
        world_size=bound.size,
        timeout=timedelta(seconds=LIMIT_S),
    )
    return World(form_mesh(args.job.recipe.policy.mesh, device.type))


def leave(world: World) -> None:
    """Take the world down, once every process has done its work."""
    if world.size > 1:
        dist.destroy_process_group()


def _lead(args: RoleArgs, size: int, store: GroupStore) -> LeaderChannel:
    token = secrets.token_hex(16)
    line = LeaderChannel(
        name=args.replica,
        size=size,
        token=token,
        host=args.address,
        end=args.end,
        patience_s=args.job.recipe.control.lost_after_s,
    )
    rendezvous = Rendezvous(
        session=args.session, token=token, host=args.address, health_port=line.port, store=store.port
    )
    announce(rendezvous_file(args.run_dir, args.replica), rendezvous)
    return line


def _reach(rendezvous: Rendezvous, replica: str, timeout_s: float) -> TCPStore:
    try:
        # RuntimeError is what torch's stores raise on every kind of failure.
        return TCPStore(
            rendezvous.host,
            rendezvous.store,
            None,
            is_master=False,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
        )
    except RuntimeError as error:
        reason = str(error).strip().partition("\n")[0]
        raise ReplicaError(f"{replica}: its leader's store at {rendezvous.host} cannot be reached: {reason}") from error
