"""The components of a heterogeneous job for the replicas of a run: nodes, tasks, CPUs and GPUs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import attrs

from cosmos_core.protocols import Pool
from cosmos_core.run.launch.launcher import cpus_of, nodes_of, rollouts_beside, threads_of
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
        beside: Replicas of its pool on the same nodes, where two pools have the same GPUs; `gpus_per_node` are then all
            of a node that the component has, and which are whose follows from a replica's index. 0 elsewhere.
    """

    tasks: int
    cpus_per_task: int
    nodes: int | None = None
    gpus_per_node: int = 0
    gpus_per_task: int = 0
    threads: int = 1
    beside: int = 0

    def place(self, index: int) -> tuple[int, int]:
        """The first node of a replica within its component, and the first of its GPUs on each of its nodes."""
        if not self.beside or self.nodes is None:
            return 0, 0
        return index // self.beside * self.nodes, index % self.beside * (self.tasks // self.nodes) * self.gpus_per_task


@attrs.frozen(kw_only=True)
class Component:
    """One component of the job: enough for all replicas of a pool, or of two that take turns.

    Attributes:
        role: Whose it is: `controller`, `policy`, `rollout` or `policy and rollout`.
        group: Its index, for `srun --het-group`.
        tasks: Tasks in all, or per node where `nodes` is given.
        cpus_per_task: CPUs of each.
        nodes: How many; None leaves that to Slurm.
        gpus_per_node: GPUs of each.
        memory_bytes: Memory of a node that its processes take there, as the plan counts it; 0 without GPUs.
        steps: What each of its replicas takes, by the role of these.
    """

    role: str
    group: int
    tasks: int
    cpus_per_task: int
    nodes: int | None = None
    gpus_per_node: int = 0
    memory_bytes: int = 0
    steps: Mapping[str, Step] = attrs.field(factory=dict)

    @property
    def node_cpus(self) -> int:
        """CPUs that the largest part of it, which cannot be spread over nodes, takes of one node."""
        return self.cpus_per_task if self.nodes is None else self.tasks * self.cpus_per_task


def components(
    pools: Sequence[Pool], options: SlurmOptions, threads: int | None, *, takes_turns: bool = False
) -> tuple[Component, ...]:
    """The controller, and a component for each pool.

    Args:
        pools: The replicas to start.
        options: What the nodes have.
        threads: CPU threads of each process, if the recipe says how many.
        takes_turns: Whether the two pools are to have the same GPUs, where they have any.

    Raises:
        ConfigError: A pool needs GPUs that nodes do not have.
    """
    first = Component(role=CONTROLLER, group=0, tasks=1, cpus_per_task=options.controller_cpus)
    if takes_turns and pools[0].gpus and options.gpus_per_node:
        policy, rollout = pools
        return first, _shared(policy, rollout, options, threads)
    return (first, *(_component(pool, group + 1, options, threads) for group, pool in enumerate(pools)))


def _shared(policy: Pool, rollout: Pool, options: SlurmOptions, threads: int | None) -> Component:
    """A component of the policy, whose rollout replicas have the same GPUs and CPUs in turns."""
    part = _component(attrs.evolve(policy, workers=rollout.workers), 1, options, threads)
    step, gpus = part.steps["policy"], part.gpus_per_node
    assert part.nodes is not None, "it has GPUs"
    room = rollouts_beside(rollout, gpus, part.nodes)
    steps = {
        "policy": attrs.evolve(step, gpus_per_node=gpus, beside=gpus // step.gpus_per_node),
        "rollout": attrs.evolve(
            step,
            tasks=1,
            cpus_per_task=part.cpus_per_task * rollout.gpus,
            nodes=1,
            gpus_per_node=gpus,
            gpus_per_task=rollout.gpus,
            beside=room,
        ),
    }
    memory_bytes = part.memory_bytes + min(room, rollout.replicas) * rollout.host_bytes
    return attrs.evolve(part, role="policy and rollout", memory_bytes=memory_bytes, steps=steps)


def _component(pool: Pool, group: int, options: SlurmOptions, threads: int | None) -> Component:
    cpus = options.cpus_per_process or cpus_of(pool, threads, options.cpus_per_node, options.gpus_per_node)
    nodes = nodes_of(pool, options.gpus_per_node, "gpus_per_node")
    if not nodes:
        step = Step(tasks=pool.processes, cpus_per_task=cpus)
        tasks = pool.replicas * pool.processes
        return Component(role=pool.role, group=group, tasks=tasks, cpus_per_task=cpus, steps={pool.role: step})
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
        memory_bytes=tasks * beside * pool.host_bytes,
        steps={pool.role: step},
    )
