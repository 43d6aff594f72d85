"""Problems that make a recipe impossible, given what its plugins can do: `key: what, value seen; what to do`.

What a recipe alone shows is checked when it is loaded (`cosmos_core.config.checks`).
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import attrs

from cosmos_core.config.job import Stage
from cosmos_core.config.mesh import data_ranks, world_size
from cosmos_core.config.schema import AgentConfig, Recipe
from cosmos_core.config.sources import label
from cosmos_core.plugins.recipe import group_size
from cosmos_core.policy.mesh.layout import cut_bytes, misfits, rollout_misfits
from cosmos_core.protocols import AlgorithmCapabilities, EngineCapabilities, ModelCapabilities
from cosmos_core.protocols.quantization import FORMATS
from cosmos_core.run.planning.frozen import misplaced, unanswered
from cosmos_core.run.planning.memory import cache_bytes
from cosmos_core.run.planning.parts import Measured, Parts


def unlike(recipe: Recipe, stage: Stage, algorithm: AlgorithmCapabilities, model: ModelCapabilities) -> Iterator[str]:
    """The problem that a stage's algorithm prices nothing that the model makes."""
    kinds, modelled = algorithm.payload_kinds, model.payload_kinds
    if not kinds & modelled:
        yield (
            f"{stage.key}.plugin: {stage.plugin!r} prices payloads of kind {', '.join(sorted(kinds))}, and model "
            f"plugin {recipe.model.plugin!r} makes {', '.join(sorted(modelled))}; take another algorithm, or another "
            f"model{found_in(kinds)}"
        )


def unpriced(recipe: Recipe, parts: Parts, stage: Stage, algorithm: AlgorithmCapabilities) -> Iterator[str]:
    """Problems of what a stage's algorithm would be given and does not price."""
    kinds = algorithm.payload_kinds
    is_generated = algorithm.source == "rollouts" and parts.engine is not None
    # What does not go with the engine is told of that.
    made = parts.engine.payload_kinds if is_generated and parts.engine is not None else kinds
    if kinds & made:
        yield from unlike(recipe, stage, algorithm, parts.model)
    decisions = parts.preflight.decisions
    if is_generated and decisions is not None and decisions not in algorithm.decisions:
        able = " or ".join(sorted(algorithm.decisions))
        yield (
            f"{parts.preflight.decisions_key}: with these options engine {recipe.rollout.engine.plugin!r} makes "
            f"{decisions} of rollouts, and {stage.plugin!r} prices {able}; have it make {able}, or change "
            f"{stage.key}.plugin"
        )


def unlimited(recipe: Recipe, parts: Parts) -> Iterator[str]:
    """Limits of the length of prompts that have no units."""
    for name in ("min_prompt_units", "max_prompt_units"):
        limit: int | None = getattr(recipe.dataset, name)
        if limit is not None:
            yield (
                f"dataset.{name}: {limit}, but prompts of model plugin {recipe.model.plugin!r} have no units: it makes "
                f"{', '.join(sorted(parts.model.payload_kinds))}; remove it, and leave rows out of the dataset instead"
            )


def problems(recipe: Recipe, parts: Parts) -> list[str]:
    """Everything that is wrong with the recipe, given what its parts can do; empty if it can run."""
    found = [*_data(recipe, parts), *_lengths(recipe, parts), *misfits(recipe.policy, parts.model, parts.facts)]
    for stage, algorithm in parts.stages:
        found += [*_stage(recipe, parts, stage, algorithm), *_idle(recipe, stage, algorithm)]
    kinds = {
        key: stage.optimizer.kind for key, stage in [("policy", recipe.policy), ("warmup", recipe.warmup)] if stage
    }
    found += [
        f"{key}.optimizer.kind: {kind!r} is torchao's, which is not installed; pip install 'cosmos-core[torchao]', or "
        "take 'adamw'"
        for key, kind in kinds.items()
        if kind == "adamw-8bit" and find_spec("torchao") is None
    ]
    if parts.engine is not None:
        for look in (_payload_kinds, _media, _quantization, _ranks, _cache):
            found += look(recipe, parts, parts.engine)
    found += parts.unmet
    if recipe.critic is not None and not parts.model.features:
        found.append(f"critic: model plugin {recipe.model.plugin!r} gives no features to a critic; take another model")
    found += [*misplaced(recipe, parts, known=found)]
    return [*found, *record_misfits(recipe, parts), *environment_misfits(recipe, parts), *parts.preflight.problems]


def _unusable(name: str, measured: Measured) -> Iterator[str]:
    """A dataset of which no row can be used; some bad ones are passed over, as in the run."""
    if measured.num_unusable and measured.num_unusable == measured.num_rows:
        yield (
            f"dataset: none of the {measured.num_rows} train rows of {name!r} that were looked at can be used; "
            f"the first: {measured.fault}"
        )
    elif measured.num_unfit and measured.num_unusable + measured.num_unfit == measured.num_rows:
        yield (
            f"dataset.min_prompt_units, dataset.max_prompt_units: none of the {measured.num_rows} train rows of "
            f"{name!r} that were looked at is of a length between them; widen them"
        )


def _idle(recipe: Recipe, stage: Stage, algorithm: AlgorithmCapabilities) -> Iterator[str]:
    """Processes that no sequence of a step is left for."""
    mesh, replicas = recipe.policy.mesh, recipe.policy.replicas
    shares = replicas * data_ranks(mesh)
    each = group_size(recipe, algorithm.source)
    if stage.prompts_per_step * each >= shares:
        return
    key = "warmup.prompts_per_step" if stage.key == "warmup" else "policy.prompts_per_step"
    yield (
        f"{key}: {stage.prompts_per_step * each} sequences a step cannot be shared among policy.replicas · "
        f"dp_replicate · dp_shard = {shares} processes; raise it to at least {-(-shares // each)}, or use fewer"
    )


def _data(recipe: Recipe, parts: Parts) -> Iterator[str]:
    name = label(recipe.dataset.plugin)
    yield from _unusable(name, parts.measured) if parts.has_tokens else unlimited(recipe, parts)
    if parts.num_heldout_rows == 0 and recipe.evaluation.interval > 0 and recipe.evaluation.prompts > 0:
        some = "give it some" if name == recipe.dataset.plugin else "hold some out by dataset.options.heldout_rows"
        yield (
            f"evaluation.interval: {recipe.evaluation.interval}, but dataset {name!r} has no held-out rows; "
            f"{some}, or set evaluation.prompts = 0"
        )
    measured = parts.measured
    if not recipe.reward_names and measured.num_heldout and not measured.num_heldout_demonstrations:
        yield (
            f"evaluation.prompts: without rewards, the loss of held-out demonstrations is what is evaluated, but none "
            f"of the first {measured.num_heldout} held-out rows of dataset {name!r} has one; map a field to them in "
            "[dataset.options], or set evaluation.prompts = 0"
        )


def _lengths(recipe: Recipe, parts: Parts) -> Iterator[str]:
    facts, longest = parts.facts, recipe.rollout.sampling.max_units
    if facts.vocab_size and facts.tokenizer_size > facts.vocab_size:
        yield (
            f"model: the vocabulary has {facts.vocab_size} entries, but the tokenizer gives ids up to "
            f"{facts.tokenizer_size - 1}; use the checkpoint's own tokenizer, or raise vocab_size in [model.config]"
        )
    if not parts.has_tokens:
        # Decisions of latents are forwards of their own: no context holds them, and micro-batches split them.
        return
    if parts.engine is None:
        yield from _demonstrations(recipe, parts)
        return
    for key, units in (("rollout.sampling.max_units", longest), ("evaluation.max_units", recipe.evaluation.max_units)):
        if units is not None and units >= facts.context_length:
            yield (
                f"{key}: {units} leaves no room for a prompt in the model's context of {facts.context_length}; lower it"
            )
    measured = parts.measured
    needed = min(measured.longest_prompt + longest, facts.context_length)
    if longest < facts.context_length < measured.shortest_prompt + longest:
        yield (
            f"rollout.sampling.max_units: no prompt fits: the shortest of {measured.num_rows} has "
            f"{measured.shortest_prompt} units, with a completion of up to {longest} more than the model's context of "
            f"{facts.context_length}; shorten prompts or completions, or take a model with a longer context"
        )
    elif longest < facts.context_length and needed > recipe.policy.micro_batch_units:
        yield (
            f"policy.micro_batch_units: {recipe.policy.micro_batch_units} is less than one sample can have; "
            f"raise it to {needed} or more"
        )


def _demonstrations(recipe: Recipe, parts: Parts) -> Iterator[str]:
    """Prompts of which each is too long already, without its demonstration."""
    shortest, units = parts.measured.shortest_prompt, recipe.policy.micro_batch_units
    if shortest >= min(units, parts.facts.context_length):
        yield (
            f"policy.micro_batch_units: no demonstration fits: the shortest of {parts.measured.num_rows} prompts has "
            f"{shortest} units, a forward takes {units}, and the model's context is {parts.facts.context_length}; "
            "raise it, or shorten the prompts"
        )


def _stage(recipe: Recipe, parts: Parts, stage: Stage, algorithm: AlgorithmCapabilities) -> Iterator[str]:
    yield from unanswered(recipe, parts, stage)
    yield from unpriced(recipe, parts, stage, algorithm)
    if algorithm.source == "preferences" and parts.dataset.demonstrations and not parts.measured.num_preferences:
        yield (
            f"{stage.key}.plugin: {stage.plugin!r} learns from preferences, but none of {parts.measured.num_rows} "
            f"train rows of dataset {recipe.dataset.plugin!r} has both a demonstration and a rejected completion; map "
            "fields to them in [dataset.options]"
        )
        return
    if algorithm.source != "rollouts" or stage.index in parts.imitates:
        yield from _without_demonstrations(recipe, parts, stage, is_beside=algorithm.source == "rollouts")
    if algorithm.source != "rollouts":
        return
    if stage.key == "warmup":
        yield f"warmup.plugin: {stage.plugin!r} learns from rollouts; a warm-up must learn from demonstrations"
    if algorithm.needs_rewards and not recipe.reward_names:
        yield f"reward: {stage.plugin!r} learns from rewards, and the recipe has none; add a [[reward]]"
    if recipe.rollout.group_size < algorithm.min_group_size:
        yield (
            f"rollout.group_size: {recipe.rollout.group_size}, but algorithm {stage.plugin!r} needs at least "
            f"{algorithm.min_group_size} samples of each prompt; raise it"
        )
    if parts.engine is not None:
        yield from logprob_misfits(recipe, stage, algorithm, parts.engine)


def _without_demonstrations(recipe: Recipe, parts: Parts, stage: Stage, *, is_beside: bool) -> Iterator[str]:
    """Rows that have nothing to imitate."""
    does = "imitates demonstrations beside rollouts" if is_beside else "learns from demonstrations"
    instead = f"set {stage.key}.options that imitate none" if is_beside else "take another algorithm"
    if not parts.dataset.demonstrations:
        yield (
            f"{stage.key}.plugin: {stage.plugin!r} {does}, but the rows of dataset {recipe.dataset.plugin!r} have "
            f"none; map a field to them, or {instead}"
        )
    elif not parts.measured.num_demonstrations and parts.measured.num_unusable < parts.measured.num_rows:
        yield (
            f"{stage.key}.plugin: {stage.plugin!r} {does}, but none of {parts.measured.num_rows} train rows of dataset "
            f"{recipe.dataset.plugin!r} has one; map a field to them in [dataset.options], or {instead}"
        )


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


def _cache(recipe: Recipe, parts: Parts, engine: EngineCapabilities) -> Iterator[str]:
    """A KV cache that does not hold the longest sequence."""
    most, key, gib = parts.preflight.cache_bytes, parts.preflight.cache_key, 1 << 30
    needed = cache_bytes(recipe, parts.facts, parts.measured.longest_prompt, engine, 1)
    if 0 < most < needed:
        yield (
            f"{key}: {most / gib:.3g} GiB do not hold one sequence at its longest, which needs {needed / gib:.3g}; "
            "raise it"
        )


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
    left, form = supported(engine, num_ranks), recipe.rollout.quantization
    lost = [f"rollout.quantization = {form!r}"] if form in engine.quantizations - left.quantizations else []
    if parts.measured.num_with_media and engine.media and not left.media:
        lost.append("prompts that show images or videos")
    if engine.records and not left.records:
        lost += [f"{record.option}, which records what forwards do" for record in parts.records]
    for what in lost:
        yield f"rollout.mesh.tp: {num_ranks}, but engine {name!r} is for {what}, in one process only; set tp = 1"


def supported(engine: EngineCapabilities, num_ranks: int) -> EngineCapabilities:
    """The features that an engine supports on so many processes."""
    lost = engine.only_alone if num_ranks > 1 else ()
    return attrs.evolve(
        engine,
        media=engine.media and "media" not in lost,
        records=engine.records and "records" not in lost,
        quantizations=frozenset() if "quantizations" in lost else engine.quantizations,
    )


def placement_misfits(recipe: Recipe, engine: EngineCapabilities | None, *, colocates: bool) -> Iterator[str]:
    """Problems of pools that are to share GPUs.

    Args:
        recipe: The two pools.
        engine: The capabilities of the engine; None if nothing generates.
        colocates: Whether the launcher can do that.
    """
    if recipe.rollout.placement == "separate":
        return
    key, policy, rollout = "rollout.placement: 'colocated'", recipe.policy, recipe.rollout
    if engine is None:
        yield f"{key}, and nothing generates in this run; set it to 'separate'"
    elif not engine.sleeps:
        yield (
            f"{key} needs an engine that gives its memory up while the policy trains, and {rollout.engine.plugin!r} "
            "cannot (EngineCapabilities.sleeps); take another engine, or set it to 'separate'"
        )
    if not colocates:
        yield (
            f"{key}, and launcher {recipe.launch.launcher!r} gives each process GPUs of its own "
            "(LauncherCapabilities.colocates); within one node of it use launch.launcher = 'local', or set it to "
            "'separate'"
        )
    if (policy.device == "cpu") != (rollout.device == "cpu"):
        yield f"{key}: policy.device is {policy.device!r}, rollout.device {rollout.device!r}; they share none"
    needed, there = (pool.replicas * world_size(pool.mesh) for pool in (rollout, policy))
    if needed > there:
        yield (
            f"{key}: rollout.replicas and rollout.mesh make {needed} processes, each on the GPU of one of the policy's "
            f"{there}; use fewer, or more of the policy's (policy.replicas, policy.mesh)"
        )
    if recipe.sync.transport == "nccl":
        yield f"{key} puts two processes on a GPU, which sync.transport 'nccl' cannot; set that to 'auto'"


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
    if not parts.is_multi_turn:
        yield (
            f"environment.plugin: {config.plugin!r} answers with observations, and the model plugin "
            f"{recipe.model.plugin!r} does not encode any (`MultiTurnModel`); use one that does, or remove "
            "[environment]"
        )
    if "tokens" not in parts.engine.payload_kinds:
        yield (
            f"environment.plugin: dialogues are of tokens, and engine {recipe.rollout.engine.plugin!r} makes payloads "
            f"of kind {', '.join(sorted(parts.engine.payload_kinds))}; remove [environment]"
        )
    if not capable.calls_model and config.agent != AgentConfig():
        yield (
            f"environment.agent: {config.plugin!r} answers turns, and calls no model; remove [environment.agent], or "
            "take an agent"
        )
    if config.weight != 0.0 and not capable.rewards:
        yield (
            f"environment.weight: {config.weight}, but environment {config.plugin!r} gives no rewards; "
            "set it to 0, and add a [[reward]]"
        )
    if parts.measured.num_with_media and not parts.sees_turns:
        yield (
            f"environment.plugin: the dialogues of model plugin {recipe.model.plugin!r} are of text (it is no "
            f"`DialogueVision`), and {parts.measured.num_with_media} of {parts.measured.num_rows} train rows of "
            f"dataset {recipe.dataset.plugin!r} show images or videos; take another dataset or model, or remove "
            "[environment]"
        )


def found_in(kinds: frozenset[str]) -> str:
    """The place of recipes of these payloads, as the end of a remedy."""
    return ": recipes of latents are in recipes/wfm" if "latents" in kinds else ""
