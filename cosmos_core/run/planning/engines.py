"""Problems that keep a recipe's engine from making its rollouts, or its algorithms from learning from them."""

from __future__ import annotations

from collections.abc import Iterator

from cosmos_core.config.job import Stage
from cosmos_core.config.schema import Recipe
from cosmos_core.policy.mesh.layout import cut_bytes, rollout_misfits
from cosmos_core.protocols import AlgorithmCapabilities, EngineCapabilities
from cosmos_core.protocols.quantization import FORMATS
from cosmos_core.run.planning.parts import Parts


def engine_misfits(recipe: Recipe, parts: Parts, engine: EngineCapabilities) -> Iterator[str]:
    """Problems of what the engine makes, takes, holds or spreads otherwise than the recipe has it."""
    yield from _payload_kinds(recipe, parts, engine)
    yield from _media(recipe, parts, engine)
    yield from _quantization(recipe, parts, engine)
    yield from _ranks(recipe, parts, engine)


def logprob_misfits(
    recipe: Recipe, stage: Stage, algorithm: AlgorithmCapabilities, engine: EngineCapabilities
) -> Iterator[str]:
    """Problems of the engine's log-probs that a stage's algorithm cannot use."""
    sampling, semantics = recipe.rollout.sampling, engine.logprob_semantics
    whole = sampling.top_p == 1.0 and sampling.top_k == 0
    # Untouched by temperature, top-k and top-p, raw and processed log-probs are the same numbers.
    if semantics not in algorithm.logprob_semantics and not (whole and sampling.temperature == 1.0):
        yield (
            f"rollout.engine.plugin: {recipe.rollout.engine.plugin!r} gives {semantics} log-probs, but algorithm "
            f"{stage.plugin!r} can only use {', '.join(sorted(algorithm.logprob_semantics))} ones; take another "
            "engine, or temperature = 1, top_p = 1 and top_k = 0"
        )
    elif not whole and "tokens" in engine.payload_kinds:
        yield (
            f"rollout.sampling: top_p = {sampling.top_p}, top_k = {sampling.top_k} draw from a cut distribution, but "
            "the trainer's log-probs are over the whole vocabulary, so importance ratios would be wrong; "
            "set top_p = 1 and top_k = 0"
        )


def _payload_kinds(recipe: Recipe, parts: Parts, engine: EngineCapabilities) -> Iterator[str]:
    makes = engine.payload_kinds
    shows = makes | {"media"} if engine.renders else makes
    users = [(f"model {recipe.model.plugin!r}", parts.model.payload_kinds, makes)]
    users += [
        (f"algorithm {stage.plugin!r}", algorithm.payload_kinds, makes)
        for stage, algorithm in parts.stages
        if algorithm.source == "rollouts"
    ]
    users += [
        (f"reward {config.plugin!r}", capabilities.payload_kinds, shows)
        for config, capabilities in zip(recipe.reward, parts.rewards, strict=True)
    ]
    for user, kinds, made in users:
        if not made & kinds:
            yield (
                f"rollout.engine.plugin: {recipe.rollout.engine.plugin!r} makes payloads of kind "
                f"{', '.join(sorted(made))}, but {user} takes {', '.join(sorted(kinds))}; they do not go "
                f"together, so take another of one or the other{found_in(made | kinds)}"
            )


def _media(recipe: Recipe, parts: Parts, engine: EngineCapabilities) -> Iterator[str]:
    if parts.measured.num_with_media and not engine.media:
        yield (
            f"rollout.engine.plugin: {recipe.rollout.engine.plugin!r} takes prompts of text only, and "
            f"{parts.measured.num_with_media} of {parts.measured.num_rows} train rows of dataset "
            f"{recipe.dataset.plugin!r} show images or videos; use an engine that takes media, or train on "
            "demonstrations: algorithm.plugin = 'sft', without rewards"
        )


def _quantization(recipe: Recipe, parts: Parts, engine: EngineCapabilities) -> Iterator[str]:
    wanted = recipe.rollout.quantization
    if wanted == "none":
        return
    if wanted not in engine.quantizations:
        able = ", ".join(sorted(engine.quantizations)) or "none"
        yield (
            f"rollout.quantization: {wanted!r}, but engine {recipe.rollout.engine.plugin!r} does not hold weights in "
            f"it (it has: {able}); set it to 'none', or take another engine, such as 'embedded'"
        )
    if not parts.facts.matrices:
        yield (
            f"rollout.quantization: {wanted!r}, but model plugin {recipe.model.plugin!r} names no matrices of "
            f"{parts.facts.architecture} that it could be for (ModelFacts.matrices); set it to 'none'"
        )
    yield from cut_bytes(recipe.policy.mesh.tp, parts.facts, FORMATS[wanted])


def _ranks(recipe: Recipe, parts: Parts, engine: EngineCapabilities) -> Iterator[str]:
    """Problems that keep several processes of a rollout replica from generating together."""
    num_ranks, name = recipe.rollout.mesh.tp, recipe.rollout.engine.plugin
    if num_ranks == 1:
        return
    if "tp" not in engine.mesh_axes:
        yield (
            f"rollout.mesh.tp: {num_ranks}, but engine {name!r} generates in one process; set it to 1 and "
            "raise rollout.replicas, or take an engine of several processes, such as 'vllm'"
        )
        return
    yield from rollout_misfits(recipe.rollout.mesh, parts.model, parts.facts)
    left, form = engine.over(num_ranks), recipe.rollout.quantization
    lost = [f"rollout.quantization = {form!r}"] if form in engine.quantizations - left.quantizations else []
    if parts.measured.num_with_media and engine.media and not left.media:
        lost.append("prompts that show images or videos")
    if engine.records and not left.records:
        lost += [f"{record.option}, which records what forwards do" for record in parts.records]
    for what in lost:
        yield f"rollout.mesh.tp: {num_ranks}, but engine {name!r} is for {what}, in one process only; set tp = 1"


def record_misfits(recipe: Recipe, parts: Parts) -> Iterator[str]:
    """Problems of records that the model trains on and nothing makes: demonstrations have no records."""
    is_generated = any(algorithm.source == "rollouts" for _, algorithm in parts.stages)
    for record in parts.records:
        if not is_generated:
            yield (
                f"{record.option}: it trains on what forwards record while completions are generated "
                f"({record.name!r}), and every stage learns from demonstrations; leave it out, or use an algorithm "
                "that learns from rollouts"
            )
        elif parts.engine is not None and not parts.engine.records:
            yield (
                f"rollout.engine.plugin: {recipe.rollout.engine.plugin!r} does not record what the model's forwards "
                f"do, and {record.option} trains on its record {record.name!r}; use an engine that records, such as "
                f"'embedded', or leave {record.option} out"
            )


def environment_misfits(recipe: Recipe, parts: Parts) -> Iterator[str]:
    """Problems that keep the model from talking with the recipe's environment."""
    config, capable = recipe.environment, parts.environment
    if config is None or capable is None:
        return
    if parts.engine is None:
        yield (
            f"environment.plugin: {config.plugin!r} answers what a model generates, and nothing is generated: the "
            "stages learn from demonstrations, and there are no rewards; remove [environment]"
        )
        return
    if not parts.converses:
        yield (
            f"environment.plugin: {config.plugin!r} answers with observations, and the model plugin "
            f"{recipe.model.plugin!r} does not encode any (`Conversing`); use one that does, or remove [environment]"
        )
    if "tokens" not in parts.engine.payload_kinds:
        yield (
            f"environment.plugin: dialogues are of tokens, and engine {recipe.rollout.engine.plugin!r} makes payloads "
            f"of kind {', '.join(sorted(parts.engine.payload_kinds))}; remove [environment]"
        )
    if config.weight != 0.0 and not capable.rewards:
        yield (
            f"environment.weight: {config.weight}, but environment {config.plugin!r} gives no rewards; "
            "set it to 0, and add a [[reward]]"
        )
    if parts.measured.num_with_media:
        yield (
            f"environment.plugin: dialogues are of text, and {parts.measured.num_with_media} of "
            f"{parts.measured.num_rows} train rows of dataset {recipe.dataset.plugin!r} show images or videos: what a "
            "model makes of these is laid out for the row's own prompt, and the prompts of later turns go on beyond "
            "it; take another dataset, or remove [environment]"
        )


def found_in(kinds: frozenset[str]) -> str:
    """Where recipes of these payloads are, as the end of a remedy."""
    return ": recipes of latents are in recipes/wfm" if "latents" in kinds else ""
