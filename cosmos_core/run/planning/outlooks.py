"""What frozen models say of whole distributions: kept of all decisions of a step, from its start to its end."""

from __future__ import annotations

import math
from typing import Final

from cosmos_core.config.mesh import data_ranks
from cosmos_core.config.schema import Recipe
from cosmos_core.protocols import Divergence, Source
from cosmos_core.run.planning.parts import Parts

_LOGPROB_BYTES: Final = 4
_ID_BYTES: Final = 8


def outlook_bytes(recipe: Recipe, parts: Parts) -> int:
    """Most bytes of outlooks that a process of a policy replica keeps, if completions are as long as they may be.

    Those of language models: a log-prob of each token that is told apart, and its id where these are not all. Those of
    world models are in the machine's memory (`latents.latent_bytes`).

    Args:
        recipe: The run's.
        parts: Its stages, the divergences that they ask for, and the model's vocabulary.
    """
    return max((_of_stage(recipe, parts, index) for index in range(len(parts.stages))), default=0)


def _of_stage(recipe: Recipe, parts: Parts, index: int) -> int:
    stage, algorithm = parts.stages[index]
    asked = [each for each in parts.consults.get(stage.index, {}).values() if isinstance(each, Divergence)]
    if not asked:
        return 0
    mesh, vocab_size = recipe.policy.mesh, parts.facts.vocab_size
    sequences = stage.prompts_per_step * _per_prompt(recipe, algorithm.source)
    each = math.ceil(sequences / (recipe.policy.replicas * data_ranks(mesh)))
    decisions = math.ceil(each * _longest(recipe, parts, algorithm.source) / mesh.cp)
    told = min(vocab_size, asked[0].top or vocab_size)
    return decisions * told * (_LOGPROB_BYTES + (_ID_BYTES if told < vocab_size else 0))


def _per_prompt(recipe: Recipe, source: Source) -> int:
    return {"rollouts": recipe.rollout.group_size, "demonstrations": 1, "preferences": 2}[source]


def _longest(recipe: Recipe, parts: Parts, source: Source) -> int:
    """Decisions of a sequence, at most."""
    if source == "rollouts":
        return recipe.rollout.sampling.max_units
    return min(recipe.policy.micro_batch_units, parts.facts.context_length)
