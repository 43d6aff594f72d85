"""Lists the processes of a run, and counts the GPUs that they need."""

from __future__ import annotations

from cosmos_core.config.mesh import world_size
from cosmos_core.config.schema import Recipe


def gpus(recipe: Recipe, *, uses_rollouts: bool) -> int:
    """GPUs of all replicas, one for each process whose device is not the CPU, if there are GPUs.

    Pools that share them need as many as the larger one.
    """
    pools = (recipe.policy, recipe.rollout)[: 1 + uses_rollouts]
    counts = [pool.replicas * world_size(pool.mesh) for pool in pools if pool.device != "cpu"]
    return max(counts, default=0) if recipe.rollout.placement == "colocated" else sum(counts)


def processes(recipe: Recipe, *, uses_rollouts: bool) -> list[tuple[str, str, str, int]]:
    """The process table: (name, module, device, processes) of the controller and of each replica."""
    rows = [("controller", "cosmos_core.control", "cpu", 1)]
    for name in ("policy", "rollout")[: 1 + uses_rollouts]:
        pool = getattr(recipe, name)
        count = world_size(pool.mesh)
        rows += [(f"{name}-{index}", f"cosmos_core.{name}", pool.device, count) for index in range(pool.replicas)]
    return rows
