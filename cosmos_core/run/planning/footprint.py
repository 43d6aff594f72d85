"""What the estimated memory of a plan's processes means: which GPUs hold them, and whether this machine does."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Final

from cosmos_core.config.mesh import world_size
from cosmos_core.run.planning.estimate import rollout_memory
from cosmos_core.run.planning.latents import latent_bytes
from cosmos_core.run.planning.memory import RankMemory, policy_memory
from cosmos_core.run.planning.outlooks import outlook_bytes
from cosmos_core.run.planning.plan import Plan

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_GIB = 1 << 30
GPU_MEMORY: Final[Mapping[str, int]] = {"80 GB (H100)": 79 * _GIB, "141 GB (H200)": 139 * _GIB}
"""Bytes that a program can have of GPUs of common sizes."""
USABLE: Final = 0.9
"""Of a GPU's memory: buffers inside operators and fragmentation, which no estimate counts, take the rest."""


def size(num_bytes: float) -> str:
    """Bytes for people."""
    for unit in _UNITS:
        if num_bytes < 1024 or unit == _UNITS[-1]:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    raise AssertionError


def memory_by_pool(plan: Plan) -> dict[str, tuple[RankMemory, ...]]:
    """Each kind of process of one policy replica, and of one rollout replica if there are any."""
    recipe, facts = plan.job.recipe, plan.parts.facts
    frozen = {role: found.facts for role, found in plan.parts.frozen.items()}
    outlooks = outlook_bytes(recipe, plan.parts)
    policy = policy_memory(
        recipe,
        facts,
        publishes=plan.job.uses_rollouts,
        frozen=frozen,
        outlooks=outlooks,
        latents=latent_bytes(recipe, plan.parts),
    )
    found = {"policy": policy}
    if plan.job.uses_rollouts:
        parts = rollout_memory(recipe, facts, plan.parts.measured.longest_prompt)
        count = world_size(recipe.rollout.mesh)
        # A rank's new weights wait in the machine's memory until it copies them.
        host = {"weights on their way": parts["parameters"]} if count > 1 else {}
        found["rollout"] = (
            RankMemory(name="each process", count=count, device=parts, host=host, is_whole=not facts.latent_size),
        )
    return found


def total_memory(plan: Plan) -> int:
    """Bytes of all processes of all replicas, if they are all on one machine and its GPUs are its memory."""
    recipe = plan.job.recipe
    replicas = {"policy": recipe.policy.replicas, "rollout": recipe.rollout.replicas}
    return sum(
        replicas[pool] * rank.count * (sum(rank.device.values()) + sum(rank.host.values()))
        for pool, ranks in memory_by_pool(plan).items()
        for rank in ranks
    )


def machine_memory() -> int:
    """Bytes of this machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def verdict(ranks: Sequence[RankMemory], device: str, uncounted: Sequence[str] = ()) -> str:
    """The largest of a replica's processes and, unless its device is the CPU, which GPUs hold it with a tenth free.

    Args:
        ranks: The kinds of processes.
        device: That they train or generate on.
        uncounted: What comes on top, besides activations where they are not known: then none is said to hold it.
    """
    largest = max(ranks, key=lambda rank: sum(rank.device.values()))
    needed = sum(largest.device.values())
    where = f" ({largest.name})" if len(ranks) > 1 else ""
    # A process that seems to have less may be the largest if its activations are not known.
    lacking = [*([] if all(rank.is_whole for rank in ranks) else ["activations"]), *uncounted]
    fitting = [name for name, num_bytes in GPU_MEMORY.items() if needed <= USABLE * num_bytes]
    none = f"no GPU of {' or '.join(GPU_MEMORY)} holds it with a tenth free"
    if not lacking:
        most = f"at most {size(needed)} a process{where}"
        holds = f"a GPU of {' or '.join(fitting)} holds it with a tenth free" if fitting else none
        return most if device == "cpu" else f"{most}: {holds}"
    counted = (
        f"{size(needed)} a process{where} of what is counted ({', '.join(largest.device)}); {', '.join(lacking)} on top"
    )
    if device == "cpu":
        return counted
    return f"{counted}, so which GPU holds it is not known" if fitting else f"{counted}: {none}"


def room(plan: Plan, found: int, machine: int) -> str:
    """What this machine is to the processes.

    Args:
        plan: What is to run.
        found: GPUs of this machine.
        machine: Bytes of its memory.
    """
    if found:
        return f"this machine has {found}"
    total = total_memory(plan)
    if total > machine:
        return f"this machine has none, and {size(total)} do not fit its memory of {size(machine)}"
    return f"this machine has none, and its {os.cpu_count()} CPU cores run all processes"
