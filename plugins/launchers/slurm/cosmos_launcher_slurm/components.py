"""The components of a heterogeneous job for the replicas of a run: nodes, tasks, CPUs and GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import attrs

from cosmos_core.protocols import Pool
from cosmos_core.run.launch.launcher import cpus_of, nodes_of, threads_of
from cosmos_launcher_slurm.options import SlurmOptions

CONTROLLER: Final = "controller"


@attrs.frozen(kw_only=True)
class Step:
    """The resources that one replica takes of its component.

    Attributes:
        tasks: Its processes.
        cpus_per_task: CPUs of each.
        nodes: Nodes that they are on; None leaves that to Slurm.
        gpus_per_node: GPUs on each of these.
        gpus_per_task: GPUs of each process.
        threads: OpenMP threads of each process, where nobody says how many.
    """

    tasks: int
    cpus_per_task: int
    nodes: int | None = None
    gpus_per_node: int = 0
    gpus_per_task: int = 0
    threads: int = 1


@attrs.frozen(kw_only=True)
class Component:
    """One component of the job: enough for all replicas of a pool.

    Attributes:
        role: Whose it is: `controller`, `policy` or `rollout`.
        group: Its index, for `srun --het-group`.
        tasks: Tasks in all, or per node where `nodes` is given.
        cpus_per_task: CPUs of each.
        nodes: How many; None leaves that to Slurm.
        gpus_per_node: GPUs of each.
        step: What each of its replicas takes; None for the controller.
    """

    role: str
    group: int
    tasks: int
    cpus_per_task: int
    nodes: int | None = None
    gpus_per_node: int = 0
    step: Step | None = None

    @property
    def node_cpus(self) -> int:
        """CPUs that the largest part of it, which cannot be spread over nodes, takes of one node."""
        return self.cpus_per_task if self.nodes is None else self.tasks * self.cpus_per_task


def components(pools: Sequence[Pool], options: SlurmOptions, threads: int | None) -> tuple[Component, ...]:
    """The controller, and a component for each pool.

    Args:
        pools: The replicas to start.
        options: What the nodes have.
        threads: CPU threads of each process, if the recipe says how many.

    Raises:
        ConfigError: A pool needs GPUs that nodes do not have.
    """
    first = Component(role=CONTROLLER, group=0, tasks=1, cpus_per_task=options.controller_cpus)
    node = options.cpus_per_node, options.gpus_per_node
    cpus = [options.cpus_per_process or cpus_of(pool, threads, *node) for pool in pools]
    return (first, *(_component(pool, group + 1, options, cpus[group]) for group, pool in enumerate(pools)))


def _component(pool: Pool, group: int, options: SlurmOptions, cpus: int) -> Component:
    nodes = nodes_of(pool, options.gpus_per_node, "gpus_per_node")
    if not nodes:
        step = Step(tasks=pool.processes, cpus_per_task=cpus)
        tasks = pool.replicas * pool.processes
        return Component(role=pool.role, group=group, tasks=tasks, cpus_per_task=cpus, step=step)
    tasks = pool.processes // nodes
    step = Step(
        tasks=pool.processes,
        cpus_per_task=cpus,
        nodes=nodes,
        gpus_per_node=tasks * pool.gpus,
        gpus_per_task=pool.gpus,
        threads=threads_of(cpus, pool.gpus, pool.workers),
    )
    beside = min(options.gpus_per_node // step.gpus_per_node, pool.replicas)
    return Component(
        role=pool.role,
        group=group,
        tasks=tasks * beside,
        cpus_per_task=cpus,
        nodes=nodes * -(-pool.replicas // beside),
        gpus_per_node=step.gpus_per_node * beside,
        step=step,
    )
