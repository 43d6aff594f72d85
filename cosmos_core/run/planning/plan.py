"""From a recipe to a job: load what it names, measure, refuse what cannot run. No process starts here."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import attrs

from cosmos_core.config.dynamic import DynamicKey, dynamic_keys
from cosmos_core.config.job import Job, StageFacts
from cosmos_core.config.mesh import world_size
from cosmos_core.config.order import window_problem
from cosmos_core.config.schema import Recipe
from cosmos_core.config.stages import Stage, stages
from cosmos_core.config.structure import structure, unstructure
from cosmos_core.errors import ConfigError, DataError, PluginBrokenError
from cosmos_core.plugin.providing import describe
from cosmos_core.plugin.roles import (
    load_algorithm,
    load_dataset,
    load_environment,
    load_model,
    load_rewards,
    selections,
    unmet,
)
from cosmos_core.plugin.selection import PluginSet
from cosmos_core.protocols import (
    AlgorithmCapabilities,
    Consulting,
    Conversing,
    Dataset,
    Foresight,
    FrozenRole,
    Imitating,
    Model,
    Omitting,
    Paced,
    Question,
    Recording,
    Split,
    Vetting,
    Window,
)
from cosmos_core.run.launch.local import visible_gpus
from cosmos_core.run.launch.making import capabilities_of
from cosmos_core.run.planning.checks import emptiness, problems
from cosmos_core.run.planning.deciding import has_tokens
from cosmos_core.run.planning.exposure import check_exposed
from cosmos_core.run.planning.foresight import foresee
from cosmos_core.run.planning.frozen import frozen_facts
from cosmos_core.run.planning.parts import Measured, Parts
from cosmos_core.run.planning.transports import misfits
from cosmos_core.transport.keys.folder import check_folder
from cosmos_core.types import Prompt

_MEASURED_PROMPTS: Final = 200
_TOKENIZER_FILES: Final = ("tokenizer.json", "tokenizer.model", "vocab.json", "tiktoken.model", "tekken.json")


@attrs.frozen(kw_only=True, eq=False)
class Plan:
    """A run that can start.

    Attributes:
        job: What every process of the run will read; its folder is not made yet.
        plugins: The loaded plugins.
        dataset: The dataset, for showing prompts.
        parts: What the plugins can do, and what was measured.
        assets: Folder with what was made locally; to be copied into the run's folder.
    """

    job: Job
    plugins: PluginSet
    dataset: Dataset
    parts: Parts
    assets: Path

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages of the run."""
        return stages(self.job.recipe)


def make_plan(recipe: Recipe, recipe_path: Path | None, staging: Path) -> Plan:
    """Validate everything about a run and work out its job.

    Args:
        recipe: A structured recipe.
        recipe_path: The file it came from; relative paths of datasets start at its folder, else at the current one.
        staging: An empty folder for what is made locally; nothing is written elsewhere.

    Raises:
        ConfigError: The recipe cannot run; every problem that was found is listed.
        PluginError: A plugin is missing, broken or incompatible.
        DataError: The dataset is unusable.
    """
    plugins = PluginSet.load(selections(recipe))
    job = _job(recipe, recipe_path, staging)
    _check_devices(recipe, plugins)
    check_exposed(recipe, capabilities_of(recipe, plugins))
    if capabilities_of(recipe, plugins).shares_folder:
        check_keys(job)
    _check_unbuilt_options(recipe, plugins)
    dataset = load_dataset(job, plugins)
    sizes = _sizes(dataset)
    # Before a tokenizer is made from its rows.
    for problem in emptiness(recipe.dataset.plugin, sizes["train"]):
        raise ConfigError(problem)
    model = load_model(job, plugins)
    if recipe.model.tokenizer is not None and _lacks_tokenizer(job):
        job.assets.mkdir(parents=True, exist_ok=True)
        corpus = _corpus(dataset, min(sizes["train"], recipe.model.tokenizer.corpus_rows))
        model.prepare(corpus, unstructure(recipe.model.tokenizer))
    parts = _checked_parts(job, plugins, dataset, model, sizes)
    facts = tuple(
        StageFacts(
            source=algorithm.source,
            min_group_size=algorithm.min_group_size,
            dynamic=dynamic_options(plugins, stage),
            windows=_windows(
                dataset, sizes["train"], stage, describe(plugins.record("dataset", recipe.dataset.plugin))
            ),
        )
        for stage, algorithm in parts.stages
    )
    num_evaluated = min(recipe.evaluation.prompts, sizes["heldout"])
    scores = num_evaluated > 0 and bool(recipe.reward_names)
    measures = facts[-1].source != "rollouts" and parts.measured.num_heldout_demonstrations > 0
    planned = attrs.evolve(
        job,
        directory=Path(recipe.run.output_dir) / recipe.run.name,
        num_train_rows=sizes["train"],
        num_heldout_rows=sizes["heldout"],
        num_evaluation_prompts=num_evaluated,
        uses_rollouts=scores or any(stage.source == "rollouts" for stage in facts),
        stages=facts,
        num_measured_prompts=num_evaluated if measures else 0,
        fixed=_fixed(recipe, parts),
        unit="token" if has_tokens(parts) else "denoising step",
    )
    return Plan(job=planned, plugins=plugins, dataset=dataset, parts=parts, assets=job.assets)


def dynamic_options(plugins: PluginSet, stage: Stage) -> tuple[DynamicKey, ...]:
    """The options of a stage's algorithm that may change while the run goes on.

    Raises:
        ConfigError: An option is wrong.
        PluginBrokenError: An option declares itself dynamic, and what it may become cannot be told.
    """
    path = f"{stage.key}.options"
    options = plugins.provider("algorithm", stage.plugin).options
    try:
        return dynamic_keys(options, structure(stage.options, options, path), path)
    except TypeError as error:
        raise PluginBrokenError(f"{describe(plugins.record('algorithm', stage.plugin))}: {error}") from None


def _fixed(recipe: Recipe, parts: Parts) -> dict[str, str]:
    """Keys that declare themselves dynamic and cannot change in this run, for what its plugins are, and why."""
    engine, (_, algorithm) = parts.engine, parts.stages[-1]
    if engine is None or engine.logprob_semantics in algorithm.logprob_semantics:
        return {}
    why = (
        f"{recipe.rollout.engine.plugin!r} gives {engine.logprob_semantics} log-probs, which "
        f"{recipe.algorithm.plugin!r} can use at temperature 1 only"
    )
    return {"rollout.sampling.temperature": why}


def check_changed(job: Job) -> None:
    """Refuse to go on with a run that has been changed into one that cannot run.

    Raises:
        CosmosError: See `make_plan`; its weights are to be there, too.
    """
    plugins = PluginSet.load(selections(job.recipe))
    _check_devices(job.recipe, plugins)
    dataset = load_dataset(job, plugins)
    check_present(_checked_parts(job, plugins, dataset, load_model(job, plugins), _sizes(dataset)))


def _job(recipe: Recipe, recipe_path: Path | None, staging: Path) -> Job:
    """A job in the staging folder, with what is not known yet left at nothing."""
    return Job(
        run_id=f"{recipe.run.name}-{secrets.token_hex(6)}",
        directory=staging,
        recipe_directory=(recipe_path.parent if recipe_path else Path()).resolve(),
        recipe=recipe,
        num_train_rows=0,
        num_heldout_rows=0,
        num_evaluation_prompts=0,
        uses_rollouts=False,
        stages=(),
    )


def check_keys(job: Job) -> None:
    """Refuse a run whose door would not open: its recipe names keys that are not there, damaged, or not secret.

    Raises:
        ConfigError: What is wrong with them.
    """
    if job.recipe.control.keys is None:
        return
    try:
        check_folder(job.keys)
    except ConfigError as error:
        raise ConfigError(f"control.keys: {error}") from error


def _lacks_tokenizer(job: Job) -> bool:
    """Whether the recipe's tokenizer is to be made: always, or where the checkpoint is a folder without one."""
    model = job.recipe.model
    assert model.tokenizer is not None
    if model.path is None or not model.tokenizer.if_missing:
        return True
    folder = job.recipe_directory / Path(model.path).expanduser()
    return folder.is_dir() and not any((folder / name).is_file() for name in _TOKENIZER_FILES)


def _check_devices(recipe: Recipe, plugins: PluginSet) -> None:
    wanting = [f"{pool}.device" for pool in ("policy", "rollout") if getattr(recipe, pool).device == "cuda"]
    if not wanting or capabilities_of(recipe, plugins).submits:
        return
    import torch  # noqa: PLC0415 - the model plugin imports it anyway, later

    if not torch.cuda.is_available():
        raise ConfigError(f'{", ".join(wanting)}: "cuda", but torch sees no CUDA device; set "auto" or "cpu"')
    found = len(visible_gpus())
    each = world_size(recipe.policy.mesh)
    if recipe.policy.device == "cuda" and recipe.policy.replicas * each > found:
        sizes = f" · {each} processes of policy.mesh" if each > 1 else ""
        raise ConfigError(
            f"policy.replicas: {recipe.policy.replicas} replicas{sizes} need a GPU for each process, and this machine "
            f"has {found}"
        )


def check_gpus(recipe: Recipe) -> None:
    """Refuse to start replicas whose processes would have to share a GPU, which NCCL cannot.

    A plan may be made where the GPUs are not; a run may not.

    Raises:
        ConfigError: This machine has GPUs, and fewer than a replica has processes.
    """
    found = len(visible_gpus())
    for pool, config in (("policy", recipe.policy), ("rollout", recipe.rollout)):
        each = world_size(config.mesh)
        if config.device != "cpu" and 0 < found < each:
            raise ConfigError(
                f"{pool}.mesh: {each} processes of a replica need a GPU each, and this machine has {found}; use a "
                f"smaller mesh, or {pool}.device = 'cpu'"
            )


def check_present(parts: Parts) -> None:
    """Refuse to start processes that would find no weights, or an engine that cannot run.

    A plan may be made where these are not; a run may not.

    Raises:
        ConfigError: The model's checkpoint has no weights here, or the engine lacks something.
    """
    models = (parts.facts, *(frozen.facts for frozen in parts.frozen.values()))
    if lacking := [what for what in (*(each.absent_weights for each in models), parts.foresight.absent) if what]:
        raise ConfigError("\n".join(lacking))


def _check_unbuilt_options(recipe: Recipe, plugins: PluginSet) -> None:
    """Structure the options of plugins that planning does not build (the engine, the launcher, the hooks)."""
    engine = recipe.rollout.engine
    structure(engine.options, plugins.provider("engine", engine.plugin).options, "rollout.engine.options")
    launch = recipe.launch
    structure(launch.options, plugins.provider("launcher", launch.launcher).options, "launch.options")
    check_hooks(recipe, plugins)


def check_hooks(recipe: Recipe, plugins: PluginSet) -> None:
    """Refuse hooks, or options of theirs, with which a session could not begin.

    Raises:
        ConfigError: An option of a hook is wrong.
        PluginError: A hook is none.
    """
    for name in recipe.tracking.hooks:
        options = recipe.tracking.options.get(name, {})
        structure(options, plugins.provider("hook", name).options, f"tracking.options.{name}")
        plugins.check_hook(name)


def _sizes(dataset: Dataset) -> dict[Split, int]:
    return {"train": dataset.size("train"), "heldout": dataset.size("heldout")}


def _windows(dataset: Dataset, num_rows: int, stage: Stage, name: str) -> tuple[Window, ...]:
    """The pace at which a stage's rows become available; empty where all are from the start."""
    if not isinstance(dataset, Paced):
        return ()
    windows = dataset.windows(stage.steps * stage.prompts_per_step)
    if problem := window_problem(windows, num_rows):
        raise PluginBrokenError(f"{name}: windows({stage.steps * stage.prompts_per_step}): {problem}")
    return windows


def _checked_parts(job: Job, plugins: PluginSet, dataset: Dataset, model: Model, sizes: dict[Split, int]) -> Parts:
    parts = _parts(job, plugins, dataset, model, sizes)
    here = None if capabilities_of(job.recipe, plugins).submits else len(visible_gpus())
    travels = misfits(job.recipe, here) if parts.engine is not None else ()
    if found := [*problems(job.recipe, parts), *travels]:
        raise ConfigError("\n".join(found))
    return parts


def _parts(job: Job, plugins: PluginSet, dataset: Dataset, model: Model, sizes: dict[Split, int]) -> Parts:
    recipe = job.recipe
    algorithms: list[tuple[Stage, AlgorithmCapabilities]] = []
    consults: dict[int, Mapping[FrozenRole, Question | None]] = {}
    imitates: dict[int, int] = {}
    lacking: list[str] = []
    for stage in stages(recipe):
        algorithm = load_algorithm(job, plugins, stage)  # its options and its own checks
        if isinstance(algorithm, Consulting):
            consults[stage.index] = algorithm.consults
        if isinstance(algorithm, Imitating) and algorithm.num_demonstrations > 0:
            imitates[stage.index] = algorithm.num_demonstrations
        lacking += unmet(recipe, stage, algorithm)
        algorithms.append((stage, plugins.provider("algorithm", stage.plugin).capabilities))
    rewards = load_rewards(job, plugins)
    # Where nothing is trained on rollouts, train rows are never scored.
    is_scored = any(capable.source == "rollouts" for _, capable in algorithms)
    vetting = [reward for reward in rewards if isinstance(reward, Vetting)] if is_scored else []
    environment = load_environment(job, plugins)
    uses_engine = bool(recipe.reward_names) or any(capable.source == "rollouts" for _, capable in algorithms)
    facts, measured = model.facts(), _measure(model, dataset, vetting, sizes, recipe)
    foresight = Foresight()
    if uses_engine:
        foresight = foresee(recipe, plugins, model, facts, shows_media=measured.num_with_media > 0)
    return Parts(
        model=plugins.provider("model", recipe.model.plugin).capabilities,
        facts=facts,
        dataset=plugins.provider("dataset", recipe.dataset.plugin).capabilities,
        stages=algorithms,
        rewards=[plugins.provider("reward", reward.plugin).capabilities for reward in recipe.reward],
        engine=plugins.provider("engine", recipe.rollout.engine.plugin).capabilities if uses_engine else None,
        num_train_rows=sizes["train"],
        num_heldout_rows=sizes["heldout"],
        measured=measured,
        foresight=foresight,
        records=tuple(model.records()) if isinstance(model, Recording) else (),
        environment=environment,
        converses=isinstance(model, Conversing),
        consults=consults,
        imitates=imitates,
        unmet=lacking,
        frozen=frozen_facts(job, plugins, model, dataset, sizes["train"]),
        omitted={split: dataset.omitted(split) for split in sizes} if isinstance(dataset, Omitting) else {},
    )


def _measure(
    model: Model, dataset: Dataset, rewards: Sequence[Vetting], sizes: Mapping[Split, int], recipe: Recipe
) -> Measured:
    """Look at some rows, spread over the train split; unusable ones are passed over, as in the run."""
    num_rows = sizes["train"]
    count = min(num_rows, _MEASURED_PROMPTS)
    num_heldout = min(recipe.evaluation.prompts, sizes["heldout"], _MEASURED_PROMPTS)
    lengths: list[int] = []
    faults: list[str] = []
    demonstrations = preferences = shown = unfit = 0
    for index in range(count):
        try:
            prompt = dataset.row("train", index * num_rows // count)
            payload = model.encode(prompt)
            for reward in rewards:
                reward.vet(prompt)
        except DataError as error:
            faults.append(str(error))
            continue
        demonstrations += prompt.demonstration is not None
        preferences += prompt.demonstration is not None and prompt.rejected is not None
        shown += bool(prompt.media)
        if "prompt" in payload.arrays:
            num_units = payload.arrays["prompt"].shape[0]
            if recipe.dataset.unfit(num_units)[0]:
                unfit += 1
            else:
                lengths.append(num_units)
    return Measured(
        num_rows=count,
        num_demonstrations=demonstrations,
        num_preferences=preferences,
        shortest_prompt=min(lengths, default=0),
        longest_prompt=max(lengths, default=0),
        num_with_media=shown,
        num_heldout=num_heldout,
        num_heldout_demonstrations=sum(_has_demonstration(dataset, index) for index in range(num_heldout)),
        num_unusable=len(faults),
        fault=next(iter(faults), ""),
        num_unfit=unfit,
    )


def _has_demonstration(dataset: Dataset, index: int) -> bool:
    try:
        return dataset.row("heldout", index).demonstration is not None
    except DataError:
        return False


def _corpus(dataset: Dataset, num_rows: int) -> Iterator[str]:
    """Texts of the train split to make a tokenizer from: prompts as they read, and demonstrations."""
    for index in range(num_rows):
        prompt: Prompt = dataset.row("train", index)
        if isinstance(prompt.text, str):
            yield prompt.text
        else:
            yield from (message.content for message in prompt.text)
        if prompt.demonstration is not None:
            yield prompt.demonstration
