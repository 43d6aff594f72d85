"""What a role makes of its job: the plugins that it needs, with the contexts that the recipe implies."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import cast

import attrs

from cosmos_core.config.checks import staleness_bound
from cosmos_core.config.job import Job
from cosmos_core.config.schema import Recipe
from cosmos_core.config.stages import Stage, stages
from cosmos_core.plugins.nesting import dataset_context, named_parts
from cosmos_core.plugins.selection import PluginSet
from cosmos_core.protocols import (
    KINDS,
    Algorithm,
    AlgorithmCapabilities,
    AlgorithmContext,
    Consulting,
    Dataset,
    EnvironmentCapabilities,
    EnvironmentContext,
    FrozenRole,
    Kind,
    Model,
    ModelContext,
    ModelSource,
    Reward,
    RewardContext,
    Source,
    Valuing,
)
from cosmos_core.storage import fetch_model, is_url


def selections(recipe: Recipe, kinds: Collection[Kind] = KINDS) -> tuple[tuple[Kind, str], ...]:
    """The plugins that a recipe names, of the given kinds, for `PluginSet.load`."""
    named: list[tuple[Kind, str]] = [
        ("model", recipe.model.plugin),
        *(("model", frozen.plugin or recipe.model.plugin) for frozen in recipe.frozen.values()),
        *(("algorithm", stage.plugin) for stage in stages(recipe)),
        *(("reward", reward.plugin) for reward in recipe.reward),
        ("dataset", recipe.dataset.plugin),
        *(("dataset", name) for name in named_parts(recipe.dataset.options)),
        ("engine", recipe.rollout.engine.plugin),
        *(() if recipe.environment is None else (("environment", recipe.environment.plugin),)),
        ("launcher", recipe.launch.launcher),
        *(("hook", name) for name in recipe.tracking.hooks),
    ]
    return tuple(dict.fromkeys(selection for selection in named if selection[0] in kinds))


def source_of(plugins: PluginSet, stage: Stage) -> Source:
    """Where the batches of a stage come from."""
    return cast("AlgorithmCapabilities", plugins.provider("algorithm", stage.plugin).capabilities).source


def model_source(job: Job) -> ModelSource:
    """How to make the recipe's model. A relative `model.path` that exists beside the recipe means that folder.

    `~` is the home. Of a URL such as `s3://bucket/model` it is a local copy, fetched if there is none.

    Raises:
        StorageError: There is no whole model at the URL, or it cannot be fetched.
    """
    config = job.recipe.model
    context = ModelContext(
        path=_found(job, config.path) if config.path else None,
        config=config.config,
        assets=job.assets,
        trust_remote_code=config.trust_remote_code,
    )
    return ModelSource(plugin=config.plugin, options=config.options, context=context)


def _found(job: Job, path: str) -> str:
    if is_url(path):
        return str(fetch_model(path))
    beside = job.recipe_directory / Path(path).expanduser()
    return str(beside.absolute()) if beside.exists() else path


def frozen_source(job: Job, role: FrozenRole) -> ModelSource:
    """How to make a frozen model: the policy's model, but for what its table says otherwise."""
    config, policy = job.recipe.frozen[role], model_source(job)
    if config.plugin is None and config.path is None and not config.options:
        return policy
    context = attrs.evolve(
        policy.context,
        path=_found(job, config.path) if config.path else policy.context.path,
        config=None if config.path else policy.context.config,
    )
    return ModelSource(
        plugin=config.plugin or policy.plugin,
        options=config.options or (policy.options if config.plugin in {None, policy.plugin} else {}),
        context=context,
    )


def load_frozen(job: Job, plugins: PluginSet, role: FrozenRole) -> Model:
    """A frozen model of the recipe.

    Raises:
        ConfigError: An option is wrong.
        PluginError: The plugin failed.
    """
    source = frozen_source(job, role)
    return cast("Model", plugins.create("model", source.plugin, source.options, source.context, f"{role}.options"))


def load_model(job: Job, plugins: PluginSet) -> Model:
    """The recipe's model.

    Raises:
        ConfigError: An option is wrong.
        PluginError: The plugin failed.
    """
    source = model_source(job)
    return cast("Model", plugins.create("model", source.plugin, source.options, source.context, "model.options"))


def load_dataset(job: Job, plugins: PluginSet) -> Dataset:
    """The recipe's dataset.

    Raises:
        ConfigError: An option is wrong.
        DataError: Its files are missing or bad.
        PluginError: The plugin failed.
    """
    config = job.recipe.dataset
    context = dataset_context(plugins, job.recipe.run.seed, job.recipe_directory)
    return cast("Dataset", plugins.create("dataset", config.plugin, config.options, context, "dataset.options"))


def load_algorithm(job: Job, plugins: PluginSet, stage: Stage) -> Algorithm:
    """The algorithm of a stage.

    Raises:
        ConfigError: An option is wrong.
        PluginError: The plugin failed.
    """
    rollout, average = job.recipe.rollout, job.recipe.policy.average
    context = AlgorithmContext(
        group_size={"rollouts": rollout.group_size, "demonstrations": 1, "preferences": 2}[source_of(plugins, stage)],
        temperature=rollout.sampling.temperature,
        max_units=rollout.sampling.max_units,
        max_staleness=staleness_bound(job.recipe.sync),
        generates_average=average is not None and average.publish,
    )
    instance = plugins.create("algorithm", stage.plugin, stage.options, context, f"{stage.key}.options")
    return cast("Algorithm", instance)


def load_rewards(job: Job, plugins: PluginSet) -> tuple[Reward, ...]:
    """The rewards, in the order of `recipe.reward`.

    Raises:
        ConfigError: An option is wrong.
        PluginError: A plugin failed.
    """
    loaded = []
    for index, config in enumerate(job.recipe.reward):
        context = RewardContext(name=config.label, seed=job.recipe.run.seed)
        path = f"reward.{index}.options"
        loaded.append(cast("Reward", plugins.create("reward", config.plugin, config.options, context, path)))
    return tuple(loaded)


def load_environment(job: Job, plugins: PluginSet) -> EnvironmentCapabilities | None:
    """What the recipe's environment can do, once an instance of it could be made; None without one.

    Raises:
        ConfigError: An option is wrong.
        PluginError: The plugin failed.
    """
    config = job.recipe.environment
    if config is None:
        return None
    context = EnvironmentContext(name=config.plugin, seed=job.recipe.run.seed)
    plugins.create("environment", config.plugin, config.options, context, "environment.options")
    capabilities: EnvironmentCapabilities = plugins.provider("environment", config.plugin).capabilities
    return capabilities


def unmet(recipe: Recipe, stage: Stage, algorithm: Algorithm) -> Iterator[str]:
    """Tables of models that an algorithm needs, and the recipe does not have."""
    asks = f"{stage.plugin!r} with these {stage.key}.options"
    for role in algorithm.consults if isinstance(algorithm, Consulting) else ():
        if role == "average":
            if recipe.policy.average is None:
                yield (
                    f"policy.average: {asks} consults the average of the policy's weights, and the recipe keeps none; "
                    "add a table [policy.average], with publish = true where rollouts are to come from the average"
                )
        elif role not in recipe.frozen:
            what = "empty: the weights the stage starts from" if role == "reference" else "path: a checkpoint"
            yield (
                f"{role}: {asks} consults a {role} model, and the recipe has none; add a table [{role}] ({what}), or "
                "set options that need none"
            )
    if isinstance(algorithm, Valuing) and algorithm.needs_critic and recipe.critic is None:
        yield f"critic: {asks} needs a critic, and the recipe has none; add a table [critic], empty for its defaults"
