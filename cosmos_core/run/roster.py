"""The processes of a run, by module name: one controller, then every replica."""

from __future__ import annotations

import itertools
import json
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import attrs

from cosmos_core.config.job import Job
from cosmos_core.config.mesh import world_size
from cosmos_core.replica.host import host_id
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
        module="cosmos_core.controller",
        arguments=("--run", str(job.directory), *resumed, *listening),
        environment=thread_environment(1),
    )


def replica_specs(job: Job, address: str, checkpoint: str | None) -> list[ProcessSpec]:
    """Every process of every policy replica, started from `checkpoint` if there is one, and every rollout replica.

    A policy replica's processes after the first are named `policy-0.1`, `policy-0.2`, …. Each process sees one GPU, in
    turn, where this machine has some and its pool is not kept on the CPU; a rollout replica, whose engine starts what
    other processes it has, sees one for each.
    """
    recipe = job.recipe
    names: list[tuple[Role, str]] = [("policy", f"policy-{index}") for index in range(recipe.policy.replicas)]
    if job.uses_rollouts:
        names += [("rollout", f"rollout-{index}") for index in range(recipe.rollout.replicas)]
    return specs_of(job, address, names, checkpoint)


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


def role_of(spec: ProcessSpec) -> str:
    """`policy` or `rollout`."""
    return spec.module.rpartition(".")[2]


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


def address_file(job: Job) -> Path:
    """Where the controller writes its address."""
    return job.directory / "controller.json"


@attrs.frozen(kw_only=True)
class Announced:
    """What the controller that came last wrote of itself.

    Attributes:
        address: Where it listens.
        pid: Its process.
        host: The machine of that process (`replica.host.host_id`).
    """

    address: str
    pid: int
    host: str

    @property
    def machine(self) -> str:
        """Name of its machine, for people."""
        return self.host.partition("/")[0]

    @property
    def is_elsewhere(self) -> bool:
        """Whether its process is of another machine, so that only its answer shows whether it is there."""
        return self.machine != host_id().partition("/")[0]

    @property
    def is_gone(self) -> bool:
        """Whether its process is known to have ended; of another machine's, nothing is known."""
        return not self.is_elsewhere and (self.host != host_id() or not _is_alive(self.pid))


def announced(job: Job) -> Announced | None:
    """What the run's folder tells of its controller, which may be gone; None if it tells of none."""
    try:
        found: dict[str, Any] = json.loads(address_file(job).read_text(encoding="utf-8"))
        return Announced(address=str(found["address"]), pid=int(found["pid"]), host=str(found["host"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def read_address(job: Job) -> str | None:
    """Address of the controller that serves this run now; None while there is none, or if it is known to be gone.

    Of a controller on another machine this is what it wrote, even if it is gone: see `presence.find_address`.
    """
    found = announced(job)
    return None if found is None or found.is_gone else found.address


def page_words(job: Job) -> list[str]:
    """Where the run's web page is, for people; why there is none if that was not asked for; else nothing."""
    try:
        found: dict[str, Any] = json.loads(address_file(job).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return []
    if "page" in found:
        return [f"live page: {found['page']} (to change things there: the token in {found['page_token']})"]
    return [f"no live page: {found['page_problem']}"] if "page_problem" in found else []


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
