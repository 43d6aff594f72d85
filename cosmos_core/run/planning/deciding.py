"""Whether a recipe's model, engine and algorithms mean the same by a payload, its units and its decisions."""

from __future__ import annotations

from collections.abc import Iterator

from cosmos_core.config.schema import Recipe
from cosmos_core.config.stages import Stage
from cosmos_core.protocols import AlgorithmCapabilities, ModelCapabilities
from cosmos_core.run.planning.parts import Parts


def has_tokens(parts: Parts) -> bool:
    """Whether the model decides tokens; decisions of latents are forwards of their own, in no context."""
    return "tokens" in parts.model.payload_kinds


def unlike(recipe: Recipe, stage: Stage, algorithm: AlgorithmCapabilities, model: ModelCapabilities) -> Iterator[str]:
    """That a stage's algorithm prices nothing that the model makes."""
    kinds, modelled = algorithm.payload_kinds, model.payload_kinds
    if not kinds & modelled:
        yield (
            f"{stage.key}.plugin: {stage.plugin!r} prices payloads of kind {', '.join(sorted(kinds))}, and model "
            f"plugin {recipe.model.plugin!r} makes {', '.join(sorted(modelled))}; take another algorithm, or another "
            f"model{found_in(kinds)}"
        )


def found_in(kinds: frozenset[str]) -> str:
    """Where recipes of these payloads are, as the end of a remedy."""
    return ": recipes of latents are in recipes/wfm" if "latents" in kinds else ""


def unpriced(recipe: Recipe, parts: Parts, stage: Stage, algorithm: AlgorithmCapabilities) -> Iterator[str]:
    """What a stage's algorithm would be given, and does not price."""
    kinds = algorithm.payload_kinds
    is_generated = algorithm.source == "rollouts" and parts.engine is not None
    # What does not go with the engine is told of that.
    made = parts.engine.payload_kinds if is_generated and parts.engine is not None else kinds
    if kinds & made:
        yield from unlike(recipe, stage, algorithm, parts.model)
    decisions = parts.foresight.decisions
    if is_generated and decisions is not None and decisions not in algorithm.decisions:
        able = " or ".join(sorted(algorithm.decisions))
        yield (
            f"{parts.foresight.decisions_key}: with these options engine {recipe.rollout.engine.plugin!r} makes "
            f"{decisions} of rollouts, and {stage.plugin!r} prices {able}; have it make {able}, or change "
            f"{stage.key}.plugin"
        )


def unlimited(recipe: Recipe, parts: Parts) -> Iterator[str]:
    """Limits of the length of prompts that have none."""
    if has_tokens(parts):
        return
    for name in ("min_prompt_units", "max_prompt_units"):
        limit: int | None = getattr(recipe.dataset, name)
        if limit is not None:
            yield (
                f"dataset.{name}: {limit}, but prompts of model plugin {recipe.model.plugin!r} have no units: it makes "
                f"{', '.join(sorted(parts.model.payload_kinds))}; remove it, and leave rows out of the dataset instead"
            )
