"""Estimates what a run needs besides the memory of its policy: processes, GPUs, bytes of a synchronisation."""

from __future__ import annotations

import math
from typing import Final

from cosmos_core.config.mesh import world_size
from cosmos_core.config.schema import Recipe
from cosmos_core.protocols import ModelFacts
from cosmos_core.run.planning.memory import ITEM_SIZES, num_whole, quantised_bytes, version_bytes

IN_FLIGHT_COPIES: Final = 4
"""Float32 values for each value of latents in flight: the state, velocities with and without the prompt, noise."""


def longest_sample(recipe: Recipe, context_length: int, longest_prompt: int) -> int:
    """Most units of a sample that is trained on; those of an environment's observations are bounded by nothing else."""
    if recipe.environment is not None:
        return min(context_length, recipe.policy.micro_batch_units)
    return min(context_length, longest_prompt + recipe.rollout.sampling.max_units)


def rollout_memory(recipe: Recipe, facts: ModelFacts, longest_prompt: int) -> dict[str, int]:
    """Bytes of each process of one rollout replica by part.

    The cache is an upper bound: every sequence in flight at its longest. An engine that computes with codes, rather
    than with what they stand for, needs less for parameters. Of an engine that denoises the latents of samples in
    flight are counted; its text encoder, its autoencoder and what is inside a forward are not.
    """
    item_size, tp = ITEM_SIZES[recipe.rollout.precision], recipe.rollout.mesh.tp
    if facts.latent_size:
        latents = IN_FLIGHT_COPIES * 4 * facts.latent_size * recipe.rollout.max_in_flight
        return {"parameters": item_size * facts.num_parameters, "latents in flight": latents}
    units = longest_sample(recipe, facts.context_length, longest_prompt)
    values = facts.cache_size or 2 * facts.num_layers * facts.hidden_size
    cache = math.ceil(values * _cache_share(facts, tp)) * item_size * units * recipe.rollout.max_in_flight
    codes = quantised_bytes(recipe, facts)
    return {
        "parameters": item_size * (facts.num_parameters - _split_parameters(facts, tp)),
        **({"codes and scales": codes} if codes else {}),
        "KV cache (at most)": cache,
        "logits (estimate)": 2 * 4 * recipe.rollout.max_in_flight * facts.vocab_size,
    }


def _split_parameters(facts: ModelFacts, tp: int) -> int:
    """Parameters that other processes of `tp` have instead."""
    split = sum(
        part.count * (part.num_parameters - part.num_expert_parameters - num_whole(part, tp)) for part in facts.parts
    )
    return split - math.ceil(split / tp)


def _cache_share(facts: ModelFacts, tp: int) -> float:
    """Of the cache, what each process has: its heads, or one that several have if there are fewer heads than these."""
    return max(1 / tp, *(1 / heads for part in facts.parts for heads in part.head_parameters), 0.0)


def sync_bytes(recipe: Recipe, facts: ModelFacts) -> int:
    """Bytes that one rollout replica receives for one weight version."""
    return version_bytes(recipe, facts)


def gpus(recipe: Recipe, *, uses_rollouts: bool) -> int:
    """GPUs of all replicas, one a process, if they train and generate on GPUs."""
    rollouts = recipe.rollout.replicas * world_size(recipe.rollout.mesh) if uses_rollouts else 0
    return recipe.policy.replicas * world_size(recipe.policy.mesh) + rollouts


def processes(recipe: Recipe, *, uses_rollouts: bool) -> list[tuple[str, str, str, int]]:
    """The process table: (name, module, device, processes) of the controller and of each replica."""
    policy, rollout = recipe.policy, recipe.rollout
    rows = [("controller", "cosmos_core.control", "cpu", 1)]
    size = world_size(policy.mesh)
    rows += [(f"policy-{index}", "cosmos_core.policy", policy.device, size) for index in range(policy.replicas)]
    if uses_rollouts:
        size = world_size(rollout.mesh)
        rows += [(f"rollout-{index}", "cosmos_core.rollout", rollout.device, size) for index in range(rollout.replicas)]
    return rows
