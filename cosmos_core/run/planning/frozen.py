"""Problems of frozen models, which evaluate the very sequences that the policy trains on, on its processes."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import attrs

from cosmos_core.config.job import Job, Stage
from cosmos_core.config.schema import PolicyConfig, Recipe
from cosmos_core.errors import ConfigError, DataError
from cosmos_core.plugins.recipe import frozen_source, load_model
from cosmos_core.plugins.selection import PluginSet
from cosmos_core.policy.mesh.layout import misfits
from cosmos_core.policy.trial import tried
from cosmos_core.protocols import Dataset, Model, ModelCapabilities, ModelFacts
from cosmos_core.protocols.frozen import Blend, FrozenRole
from cosmos_core.run.planning.parts import FrozenFacts, Parts
from cosmos_core.types import Payload, Prompt

_COMPARED_ROWS = 16


def frozen_facts(
    job: Job, plugins: PluginSet, own: tuple[Model, ModelFacts], dataset: Dataset, num_rows: int
) -> Mapping[FrozenRole, FrozenFacts]:
    """Load the frozen models, without weights, try them, and compare how they encode some rows.

    `own` are the policy's model and what was found of it.
    """
    found: dict[FrozenRole, FrozenFacts] = {}
    for role, config in job.recipe.frozen.items():
        (model, facts), misfit = own, ""
        plugin = frozen_source(job, role).plugin
        capabilities = plugins.provider("model", plugin).capabilities
        # The policy's own model has been tried, and encodes as it does.
        if config.plugin is not None or config.path is not None or config.options:
            try:
                other = load_model(job, plugins, role)
                facts = tried(_policy_of(job.recipe), other, capabilities)
            except ConfigError as error:
                # A model knows its own table only.
                raise ConfigError(f"{role}{str(error).removeprefix('model')}") from error
            misfit = next(_misfits(model, other, dataset, num_rows), "")
        found[role] = FrozenFacts(facts=facts, misfit=misfit, plugin=plugin, capabilities=capabilities)
    return found


def _policy_of(recipe: Recipe) -> PolicyConfig:
    """The policy, as frozen models are laid out: adapters lie beside the policy's weights alone."""
    return attrs.evolve(recipe.policy, lora=None)


def _misfits(model: Model, other: Model, dataset: Dataset, num_rows: int) -> Iterator[str]:
    count = min(num_rows, _COMPARED_ROWS)
    for index in range(count):
        row = index * num_rows // count
        try:
            prompt = dataset.row("train", row)
            encoded = _encoded(model, prompt)
        except DataError:
            # Unusable rows are told of where rows are measured.
            continue
        where = f"train row {row} ({prompt.words!r:.60})"
        try:
            pairs = zip(encoded, _encoded(other, prompt), strict=True)
        except DataError as error:
            yield f"{where}, which the policy encodes, is refused by it ({error})"
            continue
        for ours, theirs in pairs:
            for name in ours.arrays:
                if name not in theirs.arrays or not _is_alike(ours, theirs, name):
                    yield f"{where} has another {name!r} for it than for the policy"


def _encoded(model: Model, prompt: Prompt) -> list[Payload]:
    found = [model.encode(prompt)]
    if prompt.demonstration is not None:
        found.append(model.encode_demonstration(prompt))
    return found


def _is_alike(ours: Payload, theirs: Payload, name: str) -> bool:
    mine, other = ours.arrays[name], theirs.arrays[name]
    return (mine.dtype, mine.shape, bytes(mine.data)) == (other.dtype, other.shape, bytes(other.data))


def misplaced(recipe: Recipe, parts: Parts, known: Collection[str]) -> Iterator[str]:
    """Problems that keep frozen models from evaluating the policy's sequences, on its processes.

    `known` is what is wrong with the policy itself, which is not told again.
    """
    longest = parts.measured.longest_prompt
    if parts.engine is not None:
        longest += recipe.rollout.sampling.max_units
    longest = min(longest, parts.facts.context_length)
    for role, frozen in parts.frozen.items():
        if frozen.misfit:
            alike = "text encoder, autoencoder and size of videos"
            if parts.has_tokens:
                alike = "tokenizer and chat template"
            yield f"{role}: {frozen.misfit}; it needs the policy's {alike}"
        for problem in misfits(_policy_of(recipe), frozen.capabilities, frozen.facts):
            if problem not in known:
                yield f"{role}: it lies on the policy's mesh; {problem}"
        if "tokens" in parts.model.payload_kinds and longest > frozen.facts.context_length:
            yield (
                f"{role}: its context is {frozen.facts.context_length} units, and sequences of this run may have "
                f"{longest}; take a model with a longer one, or shorten prompts or completions"
            )


def unanswered(recipe: Recipe, parts: Parts, stage: Stage) -> Iterator[str]:
    """Problems of what an algorithm asks of frozen models and they do not compute."""
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
