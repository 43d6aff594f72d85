"""What a run needs, by arithmetic: memory of each kind of replica by part, bytes of a weight synchronisation.

Activations are an estimate, for packed sequences and attention that keeps no score matrix: per unit and layer 34
values' worth of 16-bit bytes times the hidden size.
Source: arXiv:2205.05198, eq. 2, without its attention-score term; whole-layer checkpointing keeps the input only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from cosmos_core.config.schema import Recipe
from cosmos_core.protocols import ModelFacts

ITEM_SIZES: Final[Mapping[str, int]] = {"fp32": 4, "bf16": 2}
_LAYER_BYTES_16BIT: Final = 34


def policy_memory(recipe: Recipe, facts: ModelFacts) -> dict[str, int]:
    """Bytes of one policy replica by part (parameters, gradients and optimizer in fp32)."""
    policy, published = recipe.policy, ITEM_SIZES[recipe.rollout.precision]
    item_size = ITEM_SIZES[policy.precision]
    per_layer = 1 if policy.parallel.recompute == "full" else _LAYER_BYTES_16BIT / 2
    kept = policy.micro_batch_units * facts.hidden_size * item_size
    parts = {
        "parameters": 4 * facts.num_parameters,
        "gradients": 4 * facts.num_parameters,
        "optimizer": 8 * facts.num_parameters,
        "activations (estimate)": int(kept * facts.num_layers * per_layer),
        "logits (estimate)": 2 * 4 * policy.micro_batch_units * facts.vocab_size,
        "published weights": 2 * published * facts.num_parameters,
    }
    if policy.precision == "bf16":
        parts["bf16 copy of parameters"] = 2 * facts.num_parameters
    return parts


def rollout_memory(recipe: Recipe, facts: ModelFacts, longest_prompt: int) -> dict[str, int]:
    """Bytes of one rollout replica by part.

    The KV cache is an upper bound: as if every head had keys and values of its own.
    """
    item_size = ITEM_SIZES[recipe.rollout.precision]
    units = min(facts.context_length, longest_prompt + recipe.rollout.sampling.max_units)
    cache = 2 * facts.num_layers * facts.hidden_size * item_size * units * recipe.rollout.max_in_flight
    return {
        "parameters": item_size * facts.num_parameters,
        "KV cache (at most)": cache,
        "logits (estimate)": 2 * 4 * recipe.rollout.max_in_flight * facts.vocab_size,
    }


def sync_bytes(recipe: Recipe, facts: ModelFacts) -> int:
    """Bytes that one rollout replica receives for one weight version."""
    return ITEM_SIZES[recipe.rollout.precision] * facts.num_parameters


def processes(recipe: Recipe, *, uses_rollouts: bool) -> list[tuple[str, str, str]]:
    """The process table: (name, module, device) of each."""
    rows = [("controller", "cosmos_core.controller", "cpu")]
    rows += [(f"policy-{index}", "cosmos_core.policy", recipe.policy.device) for index in range(recipe.policy.replicas)]
    if uses_rollouts:
        replicas, device = recipe.rollout.replicas, recipe.rollout.device
        rows += [(f"rollout-{index}", "cosmos_core.rollout", device) for index in range(replicas)]
    return rows
