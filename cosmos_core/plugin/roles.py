"""What a role makes of its job: the plugins that it needs, with the contexts that the recipe implies."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import cast

from cosmos_core.config.checks import staleness_bound
from cosmos_core.config.job import Job
from cosmos_core.config.schema import Recipe
from cosmos_core.config.stages import Stage, stages
from cosmos_core.plugin.selection import PluginSet
from cosmos_core.protocols import (
    KINDS,
    Algorithm,
    AlgorithmCapabilities,
    AlgorithmContext,
    Dataset,
    DatasetContext,
    EnvironmentCapabilities,
    EnvironmentContext,
    Kind,
    Model,
    ModelContext,
    ModelSource,
    Reward,
    RewardContext,
    Source,
)


def selections(recipe: Recipe, kinds: Collection[Kind] = KINDS) -> tuple[tuple[Kind, str], ...]:
    """The plugins that a recipe names, of the given kinds, for `PluginSet.load`."""
    named: list[tuple[Kind, str]] = [
        ("model", recipe.model.plugin),
        *(("algorithm", stage.plugin) for stage in stages(recipe)),
        *(("reward", reward.plugin) for reward in recipe.reward),
        ("dataset", recipe.dataset.plugin),
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

    `~` is the home.
    """
    config = job.recipe.model
    beside = job.recipe_directory / Path(config.path).expanduser() if config.path else None
    context = ModelContext(
        path=str(beside.absolute()) if beside is not None and beside.exists() else config.path,
        config=config.config,
        assets=job.assets,
        trust_remote_code=config.trust_remote_code,
    )
    return ModelSource(plugin=config.plugin, options=config.options, context=context)


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
    context = DatasetContext(seed=job.recipe.run.seed, directory=job.recipe_directory)
    return cast("Dataset", plugins.create("dataset", config.plugin, config.options, context, "dataset.options"))


def load_algorithm(job: Job, plugins: PluginSet, stage: Stage) -> Algorithm:
    """The algorithm of a stage.

    Raises:
        ConfigError: An option is wrong.
        PluginError: The plugin failed.
    """
    rollout = job.recipe.rollout
    context = AlgorithmContext(
        group_size=rollout.group_size if source_of(plugins, stage) == "rollouts" else 1,
        temperature=rollout.sampling.temperature,
        max_units=rollout.sampling.max_units,
        max_staleness=staleness_bound(job.recipe.sync),
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
        context = RewardContext(name=config.plugin, seed=job.recipe.run.seed)
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
