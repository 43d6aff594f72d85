"""Makes the launcher that a recipe names."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final, cast

from cosmos_core.config.loading import dump_recipe
from cosmos_core.config.mesh import world_size
from cosmos_core.config.schema import LaunchConfig, Recipe
from cosmos_core.devices import num_threads
from cosmos_core.errors import ConfigError
from cosmos_core.plugins.selection import PluginSet
from cosmos_core.protocols import Launcher, LauncherCapabilities, LauncherContext, Pool
from cosmos_core.run import fork_server

_MOST_THREADS: Final = 8


def prepare(recipe: Recipe) -> None:
    """Begin to import what processes of this machine need, while their run is being planned; end it if it has none."""
    if recipe.launch.launcher == LaunchConfig().launcher:
        fork_server.prepare(num_threads(recipe.launch.threads))
    else:
        fork_server.end()


def pools(recipe: Recipe, *, uses_rollouts: bool) -> tuple[Pool, ...]:
    """The replicas that a launcher starts. The processes of a rollout engine are started by the replica itself."""
    policy, rollout = recipe.policy, recipe.rollout
    found = [
        Pool(
            role="policy",
            replicas=policy.replicas,
            processes=world_size(policy.mesh),
            gpus=0 if policy.device == "cpu" else 1,
            needs_gpus=policy.device == "cuda",
        )
    ]
    if uses_rollouts:
        found.append(
            Pool(
                role="rollout",
                replicas=rollout.replicas,
                gpus=0 if rollout.device == "cpu" else world_size(rollout.mesh),
                needs_gpus=rollout.device == "cuda",
                workers=rollout.reward_workers + (recipe.environment.workers if recipe.environment else 0),
            )
        )
    return tuple(found)


def nodes_of(pool: Pool, gpus: int, option: str) -> int:
    """`Pool.nodes` of as many GPUs as an option says, 0 if it takes none; a ConfigError if they are too few."""
    if pool.needs_gpus and not gpus:
        raise ConfigError(
            f"{pool.role}.device: 'cuda', but launch.options.{option} is 0; give the number of GPUs that a node has, "
            f"with --{option.replace('_', '-')}"
        )
    if pool.gpus > gpus > 0:
        raise ConfigError(
            f"{pool.role}.mesh: each process of a {pool.role} replica needs {pool.gpus} GPUs of one node, and a node "
            f"has {gpus} (launch.options.{option}); use a smaller mesh"
        )
    return pool.nodes(gpus // pool.gpus) if pool.gpus and gpus else 0


def rollouts_beside(rollout: Pool, gpus: int, nodes: int) -> int:
    """Rollout replicas that each of the policy's nodes, of so many GPUs, has room for in turns with the policy.

    Raises:
        ConfigError: These are fewer than the recipe wants.
    """
    room = gpus // rollout.gpus
    if room * nodes < rollout.replicas:
        raise ConfigError(
            f"rollout.placement: 'colocated': the policy has {gpus} GPUs on each of {nodes} nodes, which hold "
            f"{room * nodes} rollout replicas of {rollout.gpus} GPUs of one node each, and rollout.replicas is "
            f"{rollout.replicas}; use fewer, a smaller rollout.mesh, or a policy.mesh that fills the nodes"
        )
    return room


def threads_of(cpus: int, gpus: int, workers: int) -> int:
    """OpenMP threads where nobody says how many: of `cpus`, as many for each of a process's GPUs and for each worker.

    At most 8: images, digests and optimizers on the host gain by them, and more wait for memory. Without a GPU, 1:
    small models lose by more, many times over where cores are shared, and results would depend on the machine.
    """
    return max(1, min(_MOST_THREADS, cpus // (gpus + workers))) if gpus else 1


def cpus_of(pool: Pool, threads: int | None, node_cpus: int | None, node_gpus: int) -> int:
    """CPUs of each process: its share, by GPUs, of a node's, and one at least for each thread and worker."""
    return max((threads or 1) + pool.workers, node_cpus // node_gpus * pool.gpus if node_cpus and node_gpus else 0)


def capabilities_of(recipe: Recipe, plugins: PluginSet) -> LauncherCapabilities:
    """Capabilities of the recipe's launcher."""
    return cast("LauncherCapabilities", plugins.provider("launcher", recipe.launch.launcher).capabilities)


def make_launcher(recipe: Recipe, directory: Path, plugins: PluginSet, found: Sequence[Pool]) -> Launcher:
    """The launcher that a recipe asks for, for these replicas."""
    context = LauncherContext(
        name=recipe.run.name,
        directory=directory,
        pools=tuple(found),
        threads=recipe.launch.threads,
        recipe=dump_recipe(recipe),
        takes_turns=recipe.rollout.placement == "colocated" and len(found) > 1,
    )
    launch = recipe.launch
    return cast("Launcher", plugins.create("launcher", launch.launcher, launch.options, context, "launch.options"))
