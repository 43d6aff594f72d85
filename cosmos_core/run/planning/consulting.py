"""Whether frozen models can be asked what an algorithm asks of them, where the policy is."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import attrs

from cosmos_core.config.schema import Recipe
from cosmos_core.config.stages import Stage
from cosmos_core.models.parallel.layout import misfits
from cosmos_core.protocols import Blend, FrozenRole, ModelCapabilities
from cosmos_core.run.planning.deciding import has_tokens
from cosmos_core.run.planning.parts import Parts


def misplaced(recipe: Recipe, parts: Parts, known: Collection[str]) -> Iterator[str]:
    """What keeps frozen models from being asked about the policy's sequences, on its processes.

    Args:
        recipe: The run's.
        parts: What was found of them.
        known: What is wrong with the policy itself, which is not told again.
    """
    longest = parts.measured.longest_prompt
    if parts.engine is not None:
        longest += recipe.rollout.sampling.max_units
    longest = min(longest, parts.facts.context_length)
    for role, frozen in parts.frozen.items():
        if frozen.misfit:
            yield f"{role}: {frozen.misfit}; {_needed(parts)}"
        # Adapters lie beside the policy's weights alone.
        policy = attrs.evolve(recipe.policy, lora=None)
        for problem in misfits(policy, frozen.capabilities, frozen.facts):
            if problem not in known:
                yield f"{role}: it lies on the policy's mesh; {problem}"
        if "tokens" in parts.model.payload_kinds and longest > frozen.facts.context_length:
            yield (
                f"{role}: its context is {frozen.facts.context_length} units, and sequences of this run may have "
                f"{longest}; take a model with a longer one, or shorten prompts or completions"
            )


def _needed(parts: Parts) -> str:
    """What two models have in common that encode rows alike."""
    if has_tokens(parts):
        return "it needs the policy's tokenizer and chat template"
    return "it needs the policy's text encoder, autoencoder and size of videos"


def unanswered(recipe: Recipe, parts: Parts, stage: Stage) -> Iterator[str]:
    """What an algorithm asks of frozen models, and the models cannot answer."""
    for role, question in parts.consults.get(stage.index, {}).items():
        if question is None:
            continue
        found = parts.frozen.get(role)
        able = {recipe.model.plugin: parts.model}
        if found is not None:
            able.setdefault(found.plugin, found.capabilities)
        if isinstance(question, Blend):
            yield from _unblended(stage, role, able)
            continue
        if found is not None and found.facts.vocab_size != parts.facts.vocab_size:
            yield (
                f"{role}: its vocabulary has {found.facts.vocab_size} entries, the policy's {parts.facts.vocab_size}, "
                f"and {stage.plugin!r} compares whole distributions; take options that need the {role}'s log-probs "
                "alone, or models of one vocabulary"
            )
        for plugin, capabilities in able.items():
            if question.kind not in capabilities.divergences:
                yield (
                    f"{stage.key}.options: {stage.plugin!r} asks for the {question.kind} divergence from the {role}, "
                    f"and model plugin {plugin!r} computes {', '.join(sorted(capabilities.divergences)) or 'none'}; "
                    "take another divergence, or another model"
                )


def _unblended(stage: Stage, role: FrozenRole, able: Mapping[str, ModelCapabilities]) -> Iterator[str]:
    for plugin, capabilities in able.items():
        if not capabilities.blends:
            yield (
                f"{stage.key}.options: {stage.plugin!r} blends the policy's predictions with those of the {role}, and "
                f"model plugin {plugin!r} does not (`ModelCapabilities.blends`); take a model whose decisions are "
                "regressions, such as a world model, or another algorithm"
            )
