"""The processes of a run, by module name: one controller, then every replica."""

from __future__ import annotations

import itertools
import json
import os
import secrets
from pathlib import Path
from typing import Any, Final

from cosmos_core.config.job import Job
from cosmos_core.config.mesh import world_size
from cosmos_core.run.launch import ProcessSpec
from cosmos_core.run.launch.local import thread_environment, visible_gpus

CONTROLLER: Final = "controller"


def controller_spec(job: Job, *, resume_step: int | None) -> ProcessSpec:
    """The controller; `resume_step` is the step of the checkpoint to go on from, None for a new run."""
    resumed = () if resume_step is None else ("--resume-step", str(resume_step))
    return ProcessSpec(
        name=CONTROLLER,
        module="cosmos_core.controller",
        arguments=("--run", str(job.directory), *resumed),
        environment=thread_environment(1),
    )


def replica_specs(job: Job, address: str, checkpoint: str | None) -> list[ProcessSpec]:
    """Every process of every policy replica, started from `checkpoint` if there is one, and every rollout replica.

    A policy replica's processes after the first are named `policy-0.1`, `policy-0.2`, …. Each process sees one GPU, in
    turn, where this machine has some and its pool is not kept on the CPU; a rollout replica, whose engine starts what
    other processes it has, sees one for each.
    """
    recipe = job.recipe
    started = ("--checkpoint", checkpoint) if checkpoint else ()
    names = [
        ("policy", name, (*started, *extra))
        for index in range(recipe.policy.replicas)
        for name, extra in _processes(f"policy-{index}", world_size(recipe.policy.mesh))
    ]
    if job.uses_rollouts:
        names += [("rollout", f"rollout-{index}", ()) for index in range(recipe.rollout.replicas)]
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


def _processes(replica: str, size: int) -> list[tuple[str, tuple[str, ...]]]:
    """Name and further arguments of each process of a replica."""
    if size == 1:
        return [(replica, ())]
    session = secrets.token_hex(8)
    return [
        (f"{replica}.{rank}" if rank else replica, ("--rank", str(rank), "--session", session)) for rank in range(size)
    ]


def address_file(job: Job) -> Path:
    """Where the controller writes its address."""
    return job.directory / "controller.json"


def read_address(job: Job) -> str | None:
    """Address of the controller that serves this run now; None while there is none, or if it is gone."""
    try:
        found: dict[str, Any] = json.loads(address_file(job).read_text(encoding="utf-8"))
        address, pid = str(found["address"]), int(found["pid"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None
    return address if _is_alive(pid) else None


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
