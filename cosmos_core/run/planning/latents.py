"""Latents that a process of a policy replica keeps in the machine's memory during a step.

A decision of a world model is about as large as a video's latents: those of a whole step are kept beside the device,
and come to it with their micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from cosmos_core.config.mesh import data_ranks
from cosmos_core.config.schema import Recipe
from cosmos_core.config.stages import Stage
from cosmos_core.protocols import Source
from cosmos_core.run.planning.parts import Parts

_VALUE_BYTES: Final = 4
PACKED: Final = 2
"""Latents of a decision in a micro-batch: where it starts, and what it aims at."""


def latent_bytes(recipe: Recipe, parts: Parts) -> Mapping[str, int]:
    """Most bytes by what they are, of the stage that keeps most; nothing where decisions are tokens.

    `latents of a step` are the samples as they came, and their decisions as packed, once more while a frozen model
    packs them for itself. `outlooks` are a frozen model's, or the average's, prediction for each decision of rollouts.

    Args:
        recipe: The run's.
        parts: Its stages, what they ask and imitate, the size of latents, and what the engine says of decisions.
    """
    each = [_of_stage(recipe, parts, stage, algorithm.source) for stage, algorithm in parts.stages]
    return max(each, key=lambda kept: sum(kept.values()), default={}) if parts.facts.latent_size else {}


def _of_stage(recipe: Recipe, parts: Parts, stage: Stage, source: Source) -> dict[str, int]:
    shares = recipe.policy.replicas * data_ranks(recipe.policy.mesh)
    drawn = parts.facts.num_regressions
    if source == "rollouts":
        sequences = math.ceil(stage.prompts_per_step * recipe.rollout.group_size / shares)
        decisions = sequences * (parts.foresight.most_decisions or recipe.rollout.sampling.max_units)
        # Of transitions that follow each other the states between are kept once.
        states = sequences if parts.foresight.decisions == "regressions" else sequences + decisions
    else:
        sequences = math.ceil(stage.prompts_per_step * (2 if source == "preferences" else 1) / shares)
        decisions, states = sequences * drawn, sequences
    shown = math.ceil(stage.prompts_per_step * parts.imitates.get(stage.index, 0) / shares)
    asked = parts.consults.get(stage.index, {})
    packings = 2 if any(role != "average" for role in asked) else 1
    packed = PACKED * (packings * decisions + shown * drawn)
    outlooks = decisions if any(question is not None for question in asked.values()) else 0
    size = _VALUE_BYTES * parts.facts.latent_size
    found = {"latents of a step": size * (states + shown + packed), "outlooks": size * outlooks}
    return {name: number for name, number in found.items() if number}
