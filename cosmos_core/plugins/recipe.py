"""The plugins that a recipe names: which they are, and instances of them with the contexts that the recipe implies.

To make one raises `ConfigError` where an option is wrong, and `PluginError` where the plugin failed.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, cast

import attrs

from cosmos_core.config.checks import staleness_bound
from cosmos_core.config.job import Job, Stage
from cosmos_core.config.schema import EngineConfig, LaunchConfig, ModelConfig, Recipe
from cosmos_core.config.sources import split
from cosmos_core.config.structure import structure, unstructure
from cosmos_core.data.function import FunctionDataset, FunctionRows
from cosmos_core.errors import CosmosError, DataError, PluginError, PluginNotFoundError
from cosmos_core.plugins.choice import choose, choose_all
from cosmos_core.plugins.discovery import discover
from cosmos_core.plugins.selection import PluginSet
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
    Reward,
    RewardContext,
    Sampling,
)
from cosmos_core.protocols.algorithm import Source
from cosmos_core.protocols.frozen import FrozenRole
from cosmos_core.storage import fetch_model, is_url
from cosmos_core.types import JSON


def named_parts(options: Any, path: str = "dataset.options") -> Iterator[tuple[Kind, str, Any, str]]:
    """The datasets that a dataset is made of, so that a run knows them before it makes any: see `_named`.

    By convention its options name them in a table `part` or a list of tables `parts`, each with `plugin` and `options`.
    """
    table = options if isinstance(options, Mapping) else {}
    several = table.get("parts")
    numbered = enumerate(several if isinstance(several, list | tuple) else ())
    for key, part in (("part", table.get("part")), *((f"parts.{index}", each) for index, each in numbered)):
        # What is no such table is refused where the options are structured.
        if isinstance(part, Mapping) and isinstance(part.get("plugin"), str):
            place, nested = f"{path}.{key}.options", part.get("options") or {}
            yield "dataset", part["plugin"], nested, place
            yield from named_parts(nested, place)


def dataset_context(
    plugins: PluginSet,
    seed: int,
    directory: Path,
    key_path: str = "dataset.options",
    functions: list[FunctionRows] | None = None,
) -> DatasetContext:
    """The context of a run's dataset.

    Args:
        plugins: Where plugins of parts are loaded, and so become part of the run's record.
        seed: `run.seed`.
        directory: Folder of the recipe file.
        key_path: Where its options are.
        functions: Gets the rows of the dataset functions that it is made of.
    """

    def make(plugin: str, options: Mapping[str, JSON], path: str) -> Dataset:
        plugins.include("dataset", plugin)
        place = f"{key_path}.{path}"
        context = dataset_context(plugins, seed, directory, place, functions)
        made = cast("Dataset", plugins.create("dataset", plugin, options, context, place))
        if functions is not None and isinstance(made, FunctionDataset):
            functions.extend(made.sources)
        return made

    return DatasetContext(seed=seed, directory=directory, key_path=key_path, make=make)


def selections(recipe: Recipe, kinds: Collection[Kind] = KINDS) -> tuple[tuple[Kind, str], ...]:
    """The plugins that a recipe names, of the given kinds, for `PluginSet.load`."""
    return tuple(dict.fromkeys((kind, name) for kind, name, *_ in _named(unstructure(recipe)) if kind in kinds))


def load_plugins(recipe: Recipe) -> PluginSet:
    """Load the plugins of a recipe; a PluginError or a ConfigError tells all that `check_plugins` finds."""
    data = unstructure(recipe)
    try:
        plugins = PluginSet.load(selections(recipe))
    except PluginError as error:
        check_plugins(data, None if isinstance(error, PluginNotFoundError) else error)
        raise
    check_plugins(data, plugins=plugins)
    return plugins


def check_plugins(
    data: Mapping[str, Any], refused: CosmosError | None = None, *, plugins: PluginSet | None = None
) -> None:
    """Refuse a recipe by all that is wrong with the names of its plugins and with their options, and not by the first.

    Args:
        data: The recipe as plain data; what else is wrong with it does not matter.
        refused: The refusal of the recipe so far, which is told first.
        plugins: Its plugins, if they are loaded; else those alone are imported that are given options or in a file.
    """
    named, found = list(_named(data)), [] if refused is None else [refused]
    keys: dict[tuple[Kind, str], str] = {}
    for kind, name, _, path in named:
        keys.setdefault((kind, name), _key(kind, path))
    installed = discover(meant=(name for _, name, *_ in named)) if plugins is None else ()
    try:
        choose_all(keys if plugins is None else (), installed, keys)
    except PluginError as error:
        found.append(error)
    for kind, name, options, path in named:
        try:
            if options or plugins or split(name):
                loaded = plugins or PluginSet.load([(kind, name)], records=installed)
                structure(options, loaded.provider(kind, name).options, path)
        except PluginNotFoundError:
            continue  # told with all names
        except CosmosError as error:
            found.append(error)
    if found:
        raise type(found[0])("\n".join(dict.fromkeys(map(str, found))))


_NAMING: Final[Mapping[str, Kind]] = {
    **dict.fromkeys(("model", "reference", "teacher"), "model"),
    **dict.fromkeys(("algorithm", "warmup"), "algorithm"),
    **{kind: kind for kind in ("dataset", "reward", "environment")},
    "rollout": "engine",
    "launch": "launcher",
}
"""Tables of a recipe in which plugins are named, and their kinds."""
_UNNAMED: Final = {
    "model.": ModelConfig().plugin,
    "rollout.engine.": EngineConfig().plugin,
    "launch.": LaunchConfig().launcher,
}
"""The plugins of tables that name none."""


def _named(value: Any, path: str = "", kind: Kind | None = None) -> Iterator[tuple[Kind, str, Any, str]]:
    """The plugins that plain data of a recipe names, each with its options and their key path."""
    table = dict(enumerate(value)) if isinstance(value, list) else value if isinstance(value, Mapping) else {}
    options = table.get("options") or {}
    name = table.get("launcher" if kind == "launcher" else "plugin", _UNNAMED.get(path))
    if kind is not None and isinstance(name, str):
        yield kind, name, options, f"{path}options"
        yield from named_parts(options if kind == "dataset" else {})
    elif path == "tracking.":
        hooks = table.get("hooks")
        for hook in hooks if isinstance(hooks, list) and isinstance(options, Mapping) else ():
            if isinstance(hook, str):
                yield "hook", hook, options.get(hook) or {}, f"{path}options.{hook}"
    else:
        for key, each in table.items():
            yield from _named(each, f"{path}{key}.", kind if path else _NAMING.get(str(key)))


def _key(kind: Kind, options: str) -> str:
    """The key that names the plugin whose options are there."""
    if kind == "hook":
        return "tracking.hooks"
    return f"{options.removesuffix('options')}{'launcher' if kind == 'launcher' else 'plugin'}"


def files(recipe: Recipe) -> list[str]:
    """The plugins of a recipe that are functions or classes of files, `PATH.py:NAME`."""
    return [name for _, name in selections(recipe) if split(name) is not None]


def source_of(plugins: PluginSet, stage: Stage) -> Source:
    """The source of a stage's batches: rollouts, demonstrations or preferences."""
    return cast("AlgorithmCapabilities", plugins.provider("algorithm", stage.plugin).capabilities).source


def group_size(recipe: Recipe, source: Source) -> int:
    """Sequences of each prompt of a step."""
    return {"rollouts": recipe.rollout.group_size, "demonstrations": 1, "preferences": 2}[source]


def sampled(recipe: Recipe) -> Sampling:
    """The draws of completions to train on."""
    config = recipe.rollout.sampling
    return Sampling(
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        max_units=config.max_units,
        num_samples=recipe.rollout.group_size,
    )


def greedy(recipe: Recipe) -> Sampling:
    """The likeliest completions, of evaluations."""
    return Sampling(temperature=0.0, max_units=recipe.evaluation.max_units or recipe.rollout.sampling.max_units)


@attrs.frozen(kw_only=True, eq=False)
class ModelSource:
    """A plugin's model before it is made: which one, and of what.

    Attributes:
        plugin: The name with which recipes select it.
        options: Its options.
        context: What it is made with.
    """

    plugin: str
    options: Mapping[str, JSON] = attrs.field(factory=dict)
    context: ModelContext


def model_source(job: Job) -> ModelSource:
    """The plugin, options and context of the recipe's model. A relative `model.path` beside the recipe is that folder.

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
    """The same of a frozen model: the policy's model, but for what its table says otherwise."""
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


def load_model(job: Job, plugins: PluginSet, role: FrozenRole | None = None) -> Model:
    """The recipe's model, or a frozen one of it."""
    source = model_source(job) if role is None else frozen_source(job, role)
    path = f"{role or 'model'}.options"
    return cast("Model", plugins.create("model", source.plugin, source.options, source.context, path))


def load_dataset(job: Job, plugins: PluginSet) -> Dataset:
    """The recipe's dataset; a DataError says that its files are missing or bad, or its rows not those of the plan."""
    dataset, functions = _dataset(job, plugins)
    # A job that was not planned, or by an earlier release, has no digests.
    for function, planned in itertools.zip_longest(functions, job.row_digests) if job.row_digests else ():
        if function is None or function.digest() != planned:
            raise DataError(
                f"{'dataset' if function is None else function.label}: its rows are not those that the run was planned "
                "with: what it reads has changed since, or it gives other rows in each process: let it draw from its "
                "argument `seed`, not from the clock, and sort what a set or a folder holds; other data are for a new "
                "run"
            )
    return dataset


def planned_dataset(job: Job, plugins: PluginSet) -> tuple[Dataset, tuple[str, ...]]:
    """The recipe's dataset and `Job.row_digests`, once each dataset function of it has given the same rows twice."""
    dataset, functions = _dataset(job, plugins)
    for function in functions:
        function.require_same()
    return dataset, tuple(function.digest() for function in functions)


def _dataset(job: Job, plugins: PluginSet) -> tuple[Dataset, list[FunctionRows]]:
    config, functions = job.recipe.dataset, list[FunctionRows]()
    context = dataset_context(plugins, job.recipe.run.seed, job.recipe_directory, "dataset", functions)
    return context.make(config.plugin, config.options, "options"), functions


def load_algorithm(job: Job, plugins: PluginSet, stage: Stage) -> Algorithm:
    """The algorithm of a stage."""
    rollout, average = job.recipe.rollout, job.recipe.policy.average
    context = AlgorithmContext(
        group_size=group_size(job.recipe, source_of(plugins, stage)),
        temperature=rollout.sampling.temperature,
        max_units=rollout.sampling.max_units,
        max_staleness=staleness_bound(job.recipe.sync),
        generates_average=average is not None and average.publish,
    )
    return cast("Algorithm", plugins.create("algorithm", stage.plugin, stage.options, context, f"{stage.key}.options"))


def load_rewards(job: Job, plugins: PluginSet) -> tuple[Reward, ...]:
    """The rewards, in the order of `recipe.reward`."""
    contexts = [RewardContext(name=config.label, seed=job.recipe.run.seed) for config in job.recipe.reward]
    return tuple(
        plugins.create("reward", config.plugin, config.options, context, f"reward.{index}.options")
        for index, (config, context) in enumerate(zip(job.recipe.reward, contexts, strict=True))
    )


def load_environment(job: Job, plugins: PluginSet) -> EnvironmentCapabilities | None:
    """Capabilities of the recipe's environment, once an instance of it could be made; None without one."""
    config = job.recipe.environment
    if config is None:
        return None
    context = EnvironmentContext(name=config.label, seed=job.recipe.run.seed)
    plugins.create("environment", config.plugin, config.options, context, "environment.options")
    capabilities: EnvironmentCapabilities = plugins.provider("environment", config.plugin).capabilities
    return capabilities


def unmet(recipe: Recipe, stage: Stage, algorithm: Algorithm) -> Iterator[str]:
    """Tables of models that an algorithm needs, and the recipe does not have."""
    asks = f"{stage.plugin!r} with these {stage.key}.options"
    for role in algorithm.consults:
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
    if algorithm.needs_critic and recipe.critic is None:
        yield f"critic: {asks} needs a critic, and the recipe has none; add a table [critic], empty for its defaults"


def plugin_versions(recipe: Recipe, kinds: Collection[Kind]) -> dict[str, str]:
    """Distribution and version of the core, and of the plugins of these kinds that a recipe names, by `KIND NAME`.

    What is not installed here is left out: whoever needs it says so when it loads it.
    """
    selected, found = tuple(selections(recipe, kinds)), {"cosmos-core": version("cosmos-core")}
    records = discover(meant=(name for _, name in selected))
    for kind, name in selected:
        try:
            record = choose(kind, name, records)
        except PluginError:
            continue
        found[f"{kind} {record.name}"] = f"{record.distribution} {record.version}"
    return found
