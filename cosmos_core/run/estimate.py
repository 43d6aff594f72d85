"""What a run needs besides the memory of its policy, by arithmetic: processes, GPUs, bytes of a synchronisation."""

from __future__ import annotations

from cosmos_core.config.mesh import world_size
from cosmos_core.config.schema import Recipe
from cosmos_core.protocols import ModelFacts
from cosmos_core.run.memory import ITEM_SIZES, quantised_bytes, version_bytes


def rollout_memory(recipe: Recipe, facts: ModelFacts, longest_prompt: int) -> dict[str, int]:
    """Bytes of one rollout replica by part.

    The cache is an upper bound: every sequence in flight at its longest. An engine that computes with codes, rather
    than with what they stand for, needs less for parameters.
    """
    item_size = ITEM_SIZES[recipe.rollout.precision]
    units = min(facts.context_length, longest_prompt + recipe.rollout.sampling.max_units)
    values = facts.cache_size or 2 * facts.num_layers * facts.hidden_size
    cache = values * item_size * units * recipe.rollout.max_in_flight
    codes = quantised_bytes(recipe, facts)
    return {
        "parameters": item_size * facts.num_parameters,
        **({"codes and scales": codes} if codes else {}),
        "KV cache (at most)": cache,
        "logits (estimate)": 2 * 4 * recipe.rollout.max_in_flight * facts.vocab_size,
    }


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
    rows = [("controller", "cosmos_core.controller", "cpu", 1)]
    size = world_size(policy.mesh)
    rows += [(f"policy-{index}", "cosmos_core.policy", policy.device, size) for index in range(policy.replicas)]
    if uses_rollouts:
        size = world_size(rollout.mesh)
        rows += [(f"rollout-{index}", "cosmos_core.rollout", rollout.device, size) for index in range(rollout.replicas)]
    return rows
