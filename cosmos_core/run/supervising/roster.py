"""The processes of a run, by module name: one controller, then every replica."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Sequence
from typing import Final

from cosmos_core.config.job import Job
from cosmos_core.config.mesh import world_size
from cosmos_core.run.launch import ProcessSpec
from cosmos_core.run.launch.local import thread_environment, visible_gpus
from cosmos_core.transport.messages import Role

CONTROLLER: Final = "controller"


def controller_spec(job: Job, *, resume_step: int | None, port: int | None = None) -> ProcessSpec:
    """The controller.

    Args:
        job: The run.
        resume_step: Step of the checkpoint to go on from; None for a new run, and for one that its journal goes on.
        port: Where to listen instead of `control.port`.
    """
    resumed = () if resume_step is None else ("--resume-step", str(resume_step))
    listening = () if port is None else ("--port", str(port))
    return ProcessSpec(
        name=CONTROLLER,
        module="cosmos_core.control",
        arguments=("--run", str(job.directory), *resumed, *listening),
        environment=thread_environment(1),
    )


def replica_specs(job: Job, address: str, checkpoint: str | None) -> list[ProcessSpec]:
    """Every process of every policy replica, started from `checkpoint` if there is one, and every rollout replica.

    A policy replica's processes after the first are named `policy-0.1`, `policy-0.2`, …. Each process sees one GPU, in
    turn, where this machine has some and its pool is not kept on the CPU; a rollout replica, whose engine starts what
    other processes it has, sees one for each.
    """
    return specs_of(job, address, replicas_of(job), checkpoint)


def replicas_of(job: Job) -> list[tuple[Role, str]]:
    """The replicas that a run starts with, by role and name."""
    recipe = job.recipe
    found: list[tuple[Role, str]] = [("policy", f"policy-{index}") for index in range(recipe.policy.replicas)]
    if job.uses_rollouts:
        found += [("rollout", f"rollout-{index}") for index in range(recipe.rollout.replicas)]
    return found


def specs_of(job: Job, address: str, replicas: Sequence[tuple[Role, str]], checkpoint: str | None) -> list[ProcessSpec]:
    """Every process of some replicas, each given by role and name; see `replica_specs`."""
    recipe = job.recipe
    started = ("--checkpoint", checkpoint) if checkpoint else ()
    sizes = {"policy": world_size(recipe.policy.mesh), "rollout": 1}
    names = [
        (role, name, (*(started if role == "policy" else ()), *extra))
        for role, replica in replicas
        for name, extra in _processes(replica, sizes[role])
    ]
    gpus = itertools.cycle(visible_gpus() or [""])
    on_cpu = {"policy": recipe.policy.device == "cpu", "rollout": recipe.rollout.device == "cpu"}
    num_gpus = {"policy": 1, "rollout": world_size(recipe.rollout.mesh)}
    return [
        ProcessSpec(
            name=name,
            module=f"cosmos_core.{role}",
            arguments=("--run", str(job.directory), "--name", name, "--controller", address, *extra),
            environment={
                **thread_environment(recipe.launch.threads),
                "CUDA_VISIBLE_DEVICES": "" if on_cpu[role] else ",".join(itertools.islice(gpus, num_gpus[role])),
            },
        )
        for role, name, extra in names
    ]


def role_of(spec: ProcessSpec) -> Role:
    """What the replica that a process is of does."""
    return "policy" if spec.module.endswith(".policy") else "rollout"


def replica_of(spec: ProcessSpec) -> str:
    """Name of the replica that a process is of."""
    return spec.name.partition(".")[0]


def _processes(replica: str, size: int) -> list[tuple[str, tuple[str, ...]]]:
    """Name and further arguments of each process of a replica."""
    if size == 1:
        return [(replica, ())]
    session = secrets.token_hex(8)
    return [
        (f"{replica}.{rank}" if rank else replica, ("--rank", str(rank), "--session", session)) for rank in range(size)
    ]
