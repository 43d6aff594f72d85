"""The transport of weights from the policy to the rollout replicas: which, why, and problems of it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from cosmos_core.config.schema import LaunchConfig, Recipe
from cosmos_core.errors import ReplicaError
from cosmos_core.run.planning.processes import gpus
from cosmos_core.storage import file_system
from cosmos_core.transport.addresses import rack_id


def transport(recipe: Recipe) -> str:
    """The way of the weights, and why, for people."""
    sync = recipe.sync
    chosen = f"sync.transport = {sync.transport!r}"
    if sync.transport == "auto":
        here = f"launch.launcher {recipe.launch.launcher!r} starts every process on this machine"
        if recipe.launch.launcher != LaunchConfig().launcher:
            here = "with replicas of the same machine; ZeroMQ with others"
        otherwise = f"; from {sync.directory} where nobody answers" if sync.directory else ""
        unused = "; nothing is sent, so that sync.delta spares nothing" if sync.delta else ""
        return f"shared memory: {here}{otherwise}{unused}"
    ways = {
        "shared-memory": "shared memory",
        "zmq": "ZeroMQ, on this machine, too",
        "gloo": "a gloo process group of each rollout replica with each policy process, in CPU memory",
        "nccl": "an NCCL process group of each rollout replica with each policy process, between GPUs",
        "disk": f"stored in {sync.directory} before they are announced",
    }
    changes = "; only values that changed (sync.delta)" if sync.delta else ""
    if sync.transport in ("zmq", "gloo", "nccl") and recipe.rollout.replicas > sync.fan_out:
        changes += f"; rollout replicas pass them on, each to at most {sync.fan_out} (sync.fan_out)"
    return f"{ways[sync.transport]}: {chosen}{changes}"


def misfits(recipe: Recipe, num_gpus: int | None) -> Iterator[str]:
    """Problems that keep weights from travelling as the recipe says.

    `num_gpus` are those of the machine that everything runs on; None where it runs elsewhere.
    """
    sync = recipe.sync
    try:
        rack_id()
    except ReplicaError as error:
        yield str(error)
    # Pools on the same GPUs are refused it anywhere.
    if sync.transport == "nccl" and recipe.rollout.placement == "separate":
        needed = gpus(recipe, uses_rollouts=True)
        if num_gpus is not None and num_gpus < needed:
            yield (
                f"sync.transport: 'nccl' needs a GPU for each of the {needed} processes of policy and rollout "
                f"replicas, and this machine has {num_gpus}; set it to 'gloo' or 'auto', or use fewer processes"
            )
    if sync.directory is not None:
        yield from _unusable(sync.directory)


def _unusable(directory: str) -> Iterator[str]:
    try:
        files, path = file_system(directory)
    except ImportError as error:
        yield (
            f"sync.directory: {directory!r} needs a library that is not installed ({error}); "
            "for s3:// install cosmos-core[s3]"
        )
    except (OSError, ValueError) as error:
        yield f"sync.directory: {directory!r} cannot be used: {error}; give a path or an fsspec URL"
    else:
        if isinstance(files, MemoryFileSystem):
            yield f"sync.directory: {directory!r} is in the memory of one process; give a path that all of them see"
        elif isinstance(files, LocalFileSystem):
            yield from _unwritable(directory, Path(path))


def _unwritable(directory: str, path: Path) -> Iterator[str]:
    """Yield why versions cannot be written to a folder, which need not exist; a bucket's first version tells."""
    there = path
    try:
        there = next(each for each in (path, *path.parents) if each.exists())
        # What a user may do says little of disks that are mounted for reading, or of the superuser.
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        yield f"sync.directory: {directory!r} cannot be written: {there}: {error.strerror}; give a folder that can be"
