"""Sums up the memory of a plan's processes, and tells which GPUs hold them and whether this machine does."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import attrs

from cosmos_core.config.job import Stage
from cosmos_core.config.mesh import data_ranks, world_size
from cosmos_core.config.schema import LaunchConfig, PolicyConfig, Recipe, RolloutConfig
from cosmos_core.config.structure import unstructure
from cosmos_core.devices import BF16_CAPABILITY, Gpu, gpus, hidden, visible_gpus
from cosmos_core.errors import ConfigError
from cosmos_core.plugins.recipe import group_size
from cosmos_core.protocols import EngineCapabilities, Pool
from cosmos_core.protocols.algorithm import Source
from cosmos_core.protocols.frozen import Divergence
from cosmos_core.run.launch.launcher import capabilities_of, pools
from cosmos_core.run.planning.memory import CACHE, CODES, RankMemory, between_gpus, policy_memory, rollout_memory
from cosmos_core.run.planning.parts import Parts
from cosmos_core.run.planning.plan import Plan
from cosmos_core.transport.messages import Role
from cosmos_core.weights.wire import WINDOW

_VALUE_BYTES: Final = 4
PACKED: Final = 2
"""Latents of a decision in a micro-batch: where it starts, and what it aims at."""


def latent_bytes(recipe: Recipe, parts: Parts) -> Mapping[str, int]:
    """Most bytes by what they are, of the stage that keeps most; nothing where decisions are tokens.

    `latents of a step` are the samples as they came, and their decisions as packed, once more while a frozen model
    packs them for itself. `references` are a frozen model's, or the average's, prediction for each
    decision of rollouts.
    """
    each = [_latents_of_stage(recipe, parts, stage, algorithm.source) for stage, algorithm in parts.stages]
    return max(each, key=lambda kept: sum(kept.values()), default={}) if parts.facts.latent_size else {}


def _latents_of_stage(recipe: Recipe, parts: Parts, stage: Stage, source: Source) -> dict[str, int]:
    shares = recipe.policy.replicas * data_ranks(recipe.policy.mesh)
    drawn = parts.facts.num_regressions
    sequences = math.ceil(stage.prompts_per_step * group_size(recipe, source) / shares)
    if source == "rollouts":
        decisions = sequences * (parts.preflight.most_decisions or recipe.rollout.sampling.max_units)
        # Of transitions that follow each other the states between are kept once.
        states = sequences if parts.preflight.decisions == "regressions" else sequences + decisions
    else:
        decisions, states = sequences * drawn, sequences
    shown = math.ceil(stage.prompts_per_step * parts.imitates.get(stage.index, 0) / shares)
    asked = parts.consults.get(stage.index, {})
    packings = 2 if any(role != "average" for role in asked) else 1
    packed = PACKED * (packings * decisions + shown * drawn)
    references = decisions if any(question is not None for question in asked.values()) else 0
    size = _VALUE_BYTES * parts.facts.latent_size
    found = {"latents of a step": size * (states + shown + packed), "reference predictions": size * references}
    return {name: number for name, number in found.items() if number}


def reference_bytes(recipe: Recipe, parts: Parts) -> int:
    """Most bytes of references that a process of a policy replica keeps, if completions are as long as they may be.

    Those of language models: a log-prob of each token that is told apart, and its id where these are not all. Those of
    world models are in the machine's memory (`latents.latent_bytes`).
    """
    return max((_references_of_stage(recipe, parts, index) for index in range(len(parts.stages))), default=0)


def _references_of_stage(recipe: Recipe, parts: Parts, index: int) -> int:
    stage, algorithm = parts.stages[index]
    asked = [each for each in parts.consults.get(stage.index, {}).values() if isinstance(each, Divergence)]
    if not asked:
        return 0
    mesh, vocab_size, is_drawn = recipe.policy.mesh, parts.facts.vocab_size, algorithm.source == "rollouts"
    sequences = stage.prompts_per_step * group_size(recipe, algorithm.source)
    each = math.ceil(sequences / (recipe.policy.replicas * data_ranks(mesh)))
    longest = min(recipe.policy.micro_batch_units, parts.facts.context_length)
    decisions = math.ceil(each * (recipe.rollout.sampling.max_units if is_drawn else longest) / mesh.cp)
    told = min(vocab_size, asked[0].top or vocab_size)
    # Ids have 8 bytes.
    return decisions * told * _VALUE_BYTES * (3 if told < vocab_size else 1)


_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_GIB = 1 << 30
GPU_MEMORY: Final[Mapping[str, int]] = {"80 GB (H100)": 79 * _GIB, "141 GB (H200)": 139 * _GIB}
"""Bytes that a program can have of GPUs of common sizes."""
NO_GPU: Final = f"no GPU of {' or '.join(GPU_MEMORY)} holds it with a tenth free"
"""The end of a verdict on what is too large for any of these."""
CONTEXT_BYTES: Final = _GIB // 2
"""Of a GPU, what a process's CUDA context takes."""
NCCL_BYTES: Final = 7 * _GIB // 16
"""What NCCL's buffers take of it, for each communicator, and for each peer of all-to-all in a node of 8.

Source: github.com/NVIDIA/nccl/issues/1685 (8 H100: 1.06 GB with the context, and 3.28 GB more from an all-to-all on).
"""
OUTSIDE: Final = "CUDA and NCCL"
"""Outside of torch's allocator."""
_ASLEEP: Final = "while it sleeps"
_KEPT: Final = frozenset({"parameters", "optimizer", "average"})
USABLE: Final = 0.9
"""Of a GPU's memory: buffers inside operators and fragmentation, which no estimate counts, take the rest."""


def size(num_bytes: float) -> str:
    """Bytes for people."""
    power = min((int(num_bytes) | 1).bit_length() - 1, 40) // 10
    return f"{num_bytes / 1024**power:.{min(power, 1)}f} {_UNITS[power]}"


def memory_by_pool(plan: Plan) -> dict[str, tuple[RankMemory, ...]]:
    """Each kind of process of one policy replica, and of one rollout replica if there are any."""
    recipe, facts, told = plan.job.recipe, plan.parts.facts, plan.parts.preflight
    frozen = {role: found.facts for role, found in plan.parts.frozen.items()}
    references = reference_bytes(recipe, plan.parts)
    policy = policy_memory(
        recipe,
        facts,
        publishes=plan.job.uses_rollouts,
        frozen=frozen,
        references=references,
        latents=latent_bytes(recipe, plan.parts),
    )
    found = {"policy": policy}
    if plan.job.uses_rollouts:
        engine = plan.parts.engine or EngineCapabilities()
        parts = rollout_memory(recipe, facts, plan.parts.measured.longest_prompt, engine, told)
        count = world_size(recipe.rollout.mesh)
        # New weights wait in the machine's memory until they are copied, unless they are read where they are published.
        is_local = recipe.launch.launcher == LaunchConfig().launcher
        is_mapped = recipe.sync.transport == "shared-memory" or (recipe.sync.transport == "auto" and is_local)
        host = {} if count == 1 and is_mapped else {"weights on their way": parts["parameters"]}
        if told.builds_on_host and (first := parts["parameters"] + parts.get(CODES, 0)) > sum(host.values()):
            # They are gone before the first are on their way.
            host = {"first weights": first}
        # The replica's first process asks all of the policy's.
        parts |= between_gpus(recipe, WINDOW * recipe.policy.replicas * world_size(recipe.policy.mesh))
        found["rollout"] = (
            RankMemory(name="each process", count=count, device=parts, host=host, is_whole=not facts.latent_size),
        )
    own = {"policy": 0, "rollout": told.outside_bytes}
    outside = {pool: _outside(recipe, pool) + own[pool] for pool in found if _is_for_gpus(plan, pool, found)}
    if plan.job.takes_turns and "policy" in outside:
        found["policy"] = tuple(attrs.evolve(rank, host={**rank.host, **_asleep(rank)}) for rank in policy)
    for pool, taken in outside.items():
        # Whoever sleeps keeps it, too.
        beside = {OUTSIDE: sum(outside.values()) if plan.job.takes_turns else taken}
        found[pool] = tuple(attrs.evolve(rank, device={**rank.device, **beside}) for rank in found[pool])
    return found


def _is_for_gpus(plan: Plan, pool: str, found: Mapping[str, Sequence[RankMemory]]) -> bool:
    """False if a pool is on the CPU: by its `device`, or by `auto` in a tiny run on a machine without GPUs."""
    device: str = getattr(plan.job.recipe, pool).device
    if device != "auto" or visible_gpus() or capabilities_of(plan.job.recipe, plan.plugins).submits:
        return device != "cpu"
    # A larger one is planned where its GPUs are not.
    return any(sum(rank.device.values()) >= _GIB for ranks in found.values() for rank in ranks)


def _outside(recipe: Recipe, pool: str) -> int:
    config: PolicyConfig | RolloutConfig = getattr(recipe, pool)
    axes: int = sum(extent > 1 for extent in unstructure(config.mesh).values())
    # Communicators of axes, of all processes, and of policy replicas.
    groups = axes + (axes > 0) + (pool == "policy" and config.replicas > 1) + _pairs(recipe, pool)
    return CONTEXT_BYTES + NCCL_BYTES * (groups + min(config.mesh.cp, 8) + min(config.mesh.ep, 8) - 2)


def _pairs(recipe: Recipe, pool: str) -> int:
    """The most communicators of two that a process keeps for weights: one with each reader and each source.

    Each has one peer, for which an all-to-all takes as much: that is for both directions, and weights go one way.
    """
    if recipe.sync.transport != "nccl":
        return 0
    replicas, fan_out = recipe.rollout.replicas, recipe.sync.fan_out
    sources = recipe.policy.replicas * world_size(recipe.policy.mesh)
    # Beyond the fan-out replicas pass weights on.
    return min(replicas, fan_out) if pool == "policy" else sources + (fan_out if replicas > fan_out else 0)


def _asleep(rank: RankMemory) -> dict[str, int]:
    """The memory of the machine in which a policy process waits while the other pool has its GPU."""
    kept = [each for name, each in rank.device.items() if name in _KEPT or name.endswith("'s parameters")]
    return {_ASLEEP: sum(kept)} if kept else {}


def planned_pools(plan: Plan) -> tuple[Pool, ...]:
    """The replicas that a launcher starts, and what each of their processes holds at most."""
    counted, facts = memory_by_pool(plan), plan.parts.facts
    found = []
    for pool in pools(plan.job.recipe, uses_rollouts=plan.job.uses_rollouts):
        ranks = counted[pool.role]
        # A rollout replica's process starts those of its engine.
        each = sum(rank.count for rank in ranks) // pool.processes
        found.append(
            attrs.evolve(
                pool,
                device_bytes=each * max(sum(rank.device.values()) for rank in ranks),
                host_bytes=each * max(sum(rank.host.values()) for rank in ranks),
                uncounted=_uncounted(ranks, facts.uncounted),
            )
        )
    return tuple(found)


def _uncounted(ranks: Sequence[RankMemory], besides: Sequence[str]) -> tuple[str, ...]:
    # A process that seems to have less may be the largest if its activations are not known.
    return (*(() if all(rank.is_whole for rank in ranks) else ("activations",)), *besides)


def host_memory(plan: Plan) -> int:
    """Bytes of a machine's memory that all processes take, if they are all on one machine with GPUs."""
    pools = ("policy", "rollout")
    on_cpu = _awake(plan, [pool for pool in pools if getattr(plan.job.recipe, pool).device == "cpu"])
    return _beside(plan) + sum(on_cpu.values())


def memory_on_cpu(plan: Plan) -> dict[str, int]:
    """Bytes of all processes, by pool and `host`, if they are all on the CPU of one machine.

    The memory of a CPU sleeps in a file.
    """
    return {**_awake(plan, ("policy", "rollout")), "host": _beside(plan, without=_ASLEEP)}


def _awake(plan: Plan, pools: Sequence[str]) -> dict[str, int]:
    """Bytes of a CPU's memory that some pools take as their device; of those that take turns it has the larger."""
    awake = {
        pool: getattr(plan.job.recipe, pool).replicas
        * sum(rank.count * sum({**rank.device, OUTSIDE: 0}.values()) for rank in ranks)
        for pool, ranks in memory_by_pool(plan).items()
        if pool in pools
    }
    return dict(sorted(awake.items(), key=lambda each: each[1])[-1:]) if plan.job.takes_turns else awake


def _beside(plan: Plan, *, without: str = "") -> int:
    """Bytes of a machine's memory that all processes take beside their devices'; `without` is a part left out."""
    return sum(
        getattr(plan.job.recipe, pool).replicas * rank.count * num_bytes
        for pool, ranks in memory_by_pool(plan).items()
        for rank in ranks
        for part, num_bytes in rank.host.items()
        if part != without
    )


def machine_memory() -> int:
    """Bytes of this machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def verdicts(plan: Plan) -> dict[str, str]:
    """The sentence of each pool's memory: see `verdict`."""
    recipe, parts = plan.job.recipe, plan.parts
    shares = {"policy": 0.0, "rollout": parts.preflight.gpu_share}
    return {
        pool: verdict(ranks, getattr(recipe, pool).device, parts.facts.uncounted, share=shares[pool])
        for pool, ranks in memory_by_pool(plan).items()
    }


def verdict(ranks: Sequence[RankMemory], device: str, uncounted: Sequence[str] = (), *, share: float = 0.0) -> str:
    """The largest of a replica's processes and, unless `device` is the CPU, which GPUs hold it with a tenth free.

    Of what is tiny, which any holds, no GPUs are named. `uncounted` comes on top, besides activations where they are
    not known: then none is said to hold it. What takes a `share` of its GPU needs no more for its cache than is left
    of that.
    """
    largest = max(ranks, key=lambda rank: sum(rank.device.values()))
    needed = sum(largest.device.values())
    where = f" ({largest.name})" if len(ranks) > 1 else ""
    lacking = _uncounted(ranks, uncounted)
    least = _least(largest) if share else needed
    fitting = {
        name: num_bytes
        for name, num_bytes in GPU_MEMORY.items()
        if share <= USABLE and least <= (share or USABLE) * num_bytes
    }
    none = NO_GPU
    if share and least <= USABLE * max(GPU_MEMORY.values()):
        none = f"{NO_GPU}, where its engine takes {share:.0%} of one"
    if not lacking:
        most = f"at most {size(needed)} a process{where}"
        holds = f"a GPU of {' or '.join(fitting)} holds it with a tenth free" if fitting else none
        if fitting and share and needed > share * min(fitting.values()):
            holds = f"{holds}; its KV cache has the room that is left"
        return most if device == "cpu" or needed < _GIB else f"{most}: {holds}"
    counted = (
        f"{size(needed)} a process{where} of what is counted ({', '.join(largest.device)}); {', '.join(lacking)} on top"
    )
    if device == "cpu":
        return counted
    return f"{counted}, so which GPU holds it is not known" if fitting else f"{counted}: {none}"


def _least(rank: RankMemory) -> int:
    """Bytes of a GPU without which a process cannot begin: all but its cache, which is as large as it finds room."""
    return sum(size for name, size in rank.device.items() if name != CACHE)


def room(plan: Plan, found: int, machine: int) -> str:
    """GPUs and memory of this machine against what the processes need, in words."""
    if found:
        lacking, needed = crowded(plan), host_memory(plan)
        told = f"this machine has {found}{lacking and f', and a run would be refused: {lacking}'}"
        if needed <= machine:
            return told
        return f"{told}; its memory of {size(machine)} does not hold the {size(needed)} of it that all processes take"
    of_each, none, recipe = memory_on_cpu(plan), "this machine has none", plan.job.recipe
    if hidden():
        none = "CUDA_VISIBLE_DEVICES hides any GPU of this machine"
    pools = ("policy", "rollout")[: 1 + plan.job.uses_rollouts]
    if asked := [f"{pool}.device" for pool in pools if getattr(recipe, pool).device == "cuda"]:
        return f"{none}, and {' and '.join(asked)} = 'cuda' asks for them"
    if (total := sum(of_each.values())) > machine:
        parts = " + ".join(f"{name} {size(each)}" for name, each in of_each.items())
        return (
            f"{none}, and {size(total)} do not fit its memory of {size(machine)}: {parts} of all processes, without "
            f"what only GPUs take ({OUTSIDE}; {_ASLEEP})"
        )
    return f"{none}, so device 'auto' is the CPU: its {os.cpu_count()} cores run all processes"


def crowded(plan: Plan, joins: Role | None = None) -> str:
    """A GPU that cannot run the processes that would share it, in words; empty where all can, or no driver tells.

    Args:
        plan: Of the run.
        joins: The role of the one replica that is started here; None for all of the run's.
    """
    submits = capabilities_of(plan.job.recipe, plan.plugins).submits and joins is None
    if submits or not (shown := visible_gpus()):
        return ""
    try:
        return next(_faults(plan, shown, gpus(), joins), "")
    except ConfigError as error:
        return str(error)


def _faults(plan: Plan, shown: Sequence[str], found: Sequence[Gpu], joins: Role | None) -> Iterator[str]:
    """Yields what GPUs lack, in words.

    What the plan counts is the least that processes take; an engine may take a share of its GPU, however much it needs.
    """
    there = {name: gpu for name in shown for gpu in found if gpu.is_called(name) and gpu.memory_bytes}
    share, key = plan.parts.preflight.gpu_share, plan.parts.preflight.gpu_share_key
    taken = {name: round(share * gpu.memory_bytes) for name, gpu in there.items()}
    loads, roles = _loads(plan, shown, taken, joins)
    for name, gpu in there.items():
        load, is_shared = loads[name], share and "rollout" in roles[name]
        if () < gpu.capability < BF16_CAPABILITY:
            in_bf16 = (role for role in roles[name] if getattr(plan.job.recipe, role).precision == "bf16")
            yield from (_too_old(gpu, role) for role in in_bf16)
        text = f"GPU {gpu.number}, {gpu.name}, has {size(gpu.memory_bytes)}, and its processes need {size(load)}"
        if is_shared:
            text = f"{text}, with {size(taken[name])} for each engine ({key} = {share:g})"
            if (least := max(map(_least, memory_by_pool(plan)["rollout"]))) > taken[name]:
                yield f"{text}; without its cache one needs {size(least)}: raise {key}, or rollout.mesh.tp"
        if load > gpu.memory_bytes:
            smaller = f"make them smaller, or lower {key}" if is_shared else "or make them smaller"
            yield f"{text}; spread them over more GPUs, {smaller}: docs/guides/hardware.md"
        if load > gpu.free_bytes:
            held = gpu.memory_bytes - gpu.free_bytes
            yield f"{text}; others hold {size(held)} of it (nvidia-smi): CUDA_VISIBLE_DEVICES chooses other GPUs"


def _too_old(gpu: Gpu, role: Role) -> str:
    needed, has = (".".join(map(str, capability)) for capability in (BF16_CAPABILITY, gpu.capability))
    return (
        f"{role}.precision: 'bf16' needs a GPU of compute capability {needed} or more, and GPU {gpu.number}, "
        f"{gpu.name}, has {has}; set it to 'fp32', or choose other GPUs with CUDA_VISIBLE_DEVICES"
    )


def _loads(
    plan: Plan, shown: Sequence[str], taken: Mapping[str, int], joins: Role | None
) -> tuple[dict[str, int], dict[str, list[Role]]]:
    """Bytes that processes take of each GPU, an engine's so much, if that is not 0; the roles that have it."""
    places, loads, turns = itertools.cycle(shown), dict.fromkeys(shown, 0), plan.job.takes_turns
    # A policy that sleeps beside the engine has this.
    asleep = _outside(plan.job.recipe, "policy") if turns else 0
    roles: dict[str, list[Role]] = {name: [] for name in shown}
    for pool in planned_pools(plan):
        if joins not in (None, pool.role):
            continue
        if turns:
            places = itertools.cycle(shown)
        awake = dict.fromkeys(shown, 0)
        for _ in range((pool.replicas if joins is None else 1) * pool.processes * pool.gpus):
            place, needed = next(places), pool.device_bytes // pool.gpus
            if pool.role == "rollout" and taken.get(place):
                # Its cache is as large as it finds room.
                needed = taken[place] + asleep
            roles[place].append(pool.role)
            awake[place] += needed
        loads = {gpu: max(loads[gpu], load) if turns else loads[gpu] + load for gpu, load in awake.items()}
    return loads, roles


def check_gpu_memory(plan: Plan, joins: Role | None = None) -> None:
    """Refuse to start processes that their GPUs cannot run; a plan may be made where the GPUs are not."""
    if lacking := crowded(plan, joins):
        raise ConfigError(lacking)
