"""Makes a job from a recipe: loads what it names, measures, refuses what cannot run. Nothing of the run starts here."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path

import attrs

from cosmos_core.config.dynamic import DynamicKey, dynamic_keys
from cosmos_core.config.job import Job, Stage, StageFacts, stages
from cosmos_core.config.order import window_problem
from cosmos_core.config.schema import Recipe
from cosmos_core.config.sources import label
from cosmos_core.config.structure import structure, unstructure
from cosmos_core.devices import visible_gpus
from cosmos_core.errors import ConfigError, PluginBrokenError
from cosmos_core.plugins.recipe import (
    load_algorithm,
    load_dataset,
    load_environment,
    load_model,
    load_plugins,
    load_rewards,
    planned_dataset,
    unmet,
)
from cosmos_core.plugins.selection import PluginSet, describe
from cosmos_core.policy.trial import tried
from cosmos_core.protocols import AlgorithmCapabilities, Dataset, Model, Preflight, Split
from cosmos_core.protocols.dataset import Window
from cosmos_core.protocols.frozen import Comparison, FrozenRole
from cosmos_core.protocols.model import MoEModel, MultiTurnModel
from cosmos_core.protocols.vision import DialogueVision
from cosmos_core.run.launch.launcher import capabilities_of
from cosmos_core.run.planning.checks import placement_misfits, problems, unlike
from cosmos_core.run.planning.first_row import look_at_first
from cosmos_core.run.planning.frozen import frozen_facts
from cosmos_core.run.planning.parts import Parts, lacks_tokenizer, look_at_rows, texts
from cosmos_core.run.planning.preflight import (
    absent_gpus,
    absent_of_rewards,
    check_exposed,
    check_hooks,
    check_keys,
    check_present,
    engine_preflight,
)
from cosmos_core.run.planning.weight_transport import misfits


@attrs.frozen(kw_only=True, eq=False)
class Plan:
    """A run that can start.

    Attributes:
        job: What every process of the run will read; its folder is not made yet.
        parts: What the plugins can do, and what was measured.
        assets: Folder with what was made locally; to be copied into the run's folder.
    """

    job: Job
    plugins: PluginSet
    dataset: Dataset
    parts: Parts
    assets: Path


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
    plugins = load_plugins(recipe)
    job = _job(recipe, recipe_path, staging)
    check_exposed(recipe, capabilities_of(recipe, plugins))
    if capabilities_of(recipe, plugins).shares_folder:
        check_keys(job)
    check_hooks(recipe, plugins)
    dataset, row_digests = planned_dataset(job, plugins)
    sizes = _sizes(dataset, recipe)
    model = load_model(job, plugins)
    if recipe.model.tokenizer is not None and lacks_tokenizer(job):
        job.assets.mkdir(parents=True, exist_ok=True)
        corpus = texts(dataset, min(sizes["train"], recipe.model.tokenizer.corpus_rows))
        model.prepare(corpus, unstructure(recipe.model.tokenizer))
    parts = _checked_parts(job, plugins, dataset, model, sizes)
    facts = _facts(recipe, parts, plugins, dataset)
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
        unit="token" if parts.has_tokens else "denoising step",
        given_frames=parts.measured.given_frames,
        omitted=parts.omitted,
        is_plain=parts.is_plain,
        row_digests=row_digests,
    )
    return Plan(job=planned, plugins=plugins, dataset=dataset, parts=parts, assets=job.assets)


def _facts(recipe: Recipe, parts: Parts, plugins: PluginSet, dataset: Dataset) -> tuple[StageFacts, ...]:
    named = describe(plugins.record("dataset", recipe.dataset.plugin))
    return tuple(
        StageFacts(
            source=algorithm.source,
            min_group_size=algorithm.min_group_size,
            dynamic=dynamic_options(plugins, stage),
            windows=_windows(dataset, dataset.size("train"), stage, named),
        )
        for stage, algorithm in parts.stages
    )


def dynamic_options(plugins: PluginSet, stage: Stage) -> tuple[DynamicKey, ...]:
    """The options of a stage's algorithm that may change while the run goes on."""
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


def check_changed(job: Job) -> Plan:
    """Refuse, by a CosmosError, to go on with a run that has been changed into one that cannot run; its plan."""
    plan = plan_again(job)
    check_present(plan.parts)
    return plan


def plan_again(job: Job) -> Plan:
    """The plan of a run that has begun; raises as `make_plan`."""
    plugins = load_plugins(job.recipe)
    dataset = load_dataset(job, plugins)
    parts = _checked_parts(job, plugins, dataset, load_model(job, plugins), _sizes(dataset, job.recipe))
    return Plan(job=job, plugins=plugins, dataset=dataset, parts=parts, assets=job.assets)


def _job(recipe: Recipe, recipe_path: Path | None, staging: Path) -> Job:
    """A job in the staging folder, with what is not known yet left at nothing."""
    return Job(
        run_id=f"{recipe.run.name}-{secrets.token_hex(6)}",
        directory=staging,
        recipe_directory=(recipe_path.parent if recipe_path else Path()).resolve(),
        recipe=recipe,
    )


def _sizes(dataset: Dataset, recipe: Recipe) -> dict[Split, int]:
    if not (num_train_rows := dataset.size("train")):
        name = label(recipe.dataset.plugin)
        raise ConfigError(f"dataset: {name!r} has no train rows; check its files and filters in [dataset.options]")
    return {"train": num_train_rows, "heldout": dataset.size("heldout")}


def _windows(dataset: Dataset, num_rows: int, stage: Stage, name: str) -> tuple[Window, ...]:
    """The pace at which a stage's rows become available; empty where all are from the start."""
    if not hasattr(dataset, "windows"):
        return ()
    windows: tuple[Window, ...] = dataset.windows(stage.steps * stage.prompts_per_step)
    if problem := window_problem(windows, num_rows):
        raise PluginBrokenError(f"{name}: windows({stage.steps * stage.prompts_per_step}): {problem}")
    return windows


def _checked_parts(job: Job, plugins: PluginSet, dataset: Dataset, model: Model, sizes: dict[Split, int]) -> Parts:
    parts = _parts(job, plugins, dataset, model, sizes)
    launcher = capabilities_of(job.recipe, plugins)
    travels = misfits(job.recipe, None if launcher.submits else len(visible_gpus())) if parts.engine is not None else ()
    placed = placement_misfits(job.recipe, parts.engine, colocates=launcher.colocates)
    if found := [*problems(job.recipe, parts), *travels, *placed]:
        raise ConfigError("\n".join(found))
    return parts


def _parts(job: Job, plugins: PluginSet, dataset: Dataset, model: Model, sizes: dict[Split, int]) -> Parts:
    recipe = job.recipe
    algorithms: list[tuple[Stage, AlgorithmCapabilities]] = []
    consults: dict[int, Mapping[FrozenRole, Comparison | None]] = {}
    imitates: dict[int, int] = {}
    lacking: list[str] = []
    makes = plugins.provider("model", recipe.model.plugin).capabilities
    for stage in stages(recipe):
        capable = plugins.provider("algorithm", stage.plugin).capabilities
        # First: what its own checks ask for would not help.
        for problem in unlike(recipe, stage, capable, makes):
            raise ConfigError(problem)
        algorithm = load_algorithm(job, plugins, stage)  # its options and its own checks
        consults[stage.index] = algorithm.consults
        if algorithm.num_demonstrations > 0:
            imitates[stage.index] = algorithm.num_demonstrations
        lacking += unmet(recipe, stage, algorithm)
        algorithms.append((stage, capable))
    rewards = load_rewards(job, plugins)
    # Where nothing is trained on rollouts, train rows are never scored.
    is_scored = any(capable.source == "rollouts" for _, capable in algorithms)
    uses_rewards = is_scored or min(recipe.evaluation.prompts, sizes["heldout"]) > 0
    environment = load_environment(job, plugins)
    uses_engine = bool(recipe.reward_names) or is_scored
    learns = bool(imitates) or any(capable.source == "demonstrations" for _, capable in algorithms)
    facts = tried(recipe.policy, model, makes)
    longest = min(facts.context_length, recipe.policy.micro_batch_units)
    longest -= recipe.rollout.sampling.max_units if is_scored else 1
    measured = look_at_rows(
        model, dataset, rewards if is_scored else [], sizes, recipe, imitates=learns, longest=longest
    )
    capable = [plugins.provider("reward", each.plugin).capabilities for each in recipe.reward]
    scoring = list(zip(recipe.reward, capable, rewards, strict=True)) if is_scored else []
    preflight = Preflight()
    if uses_engine:
        preflight = engine_preflight(recipe, plugins, model, facts, shows_media=measured.num_with_media > 0)
    return Parts(
        model=makes,
        facts=facts,
        dataset=plugins.provider("dataset", recipe.dataset.plugin).capabilities,
        stages=algorithms,
        rewards=capable,
        engine=plugins.provider("engine", recipe.rollout.engine.plugin).capabilities if uses_engine else None,
        num_train_rows=sizes["train"],
        num_heldout_rows=sizes["heldout"],
        measured=measured,
        preflight=preflight,
        first_row=look_at_first(model, dataset, scoring, sizes["train"]),
        records=tuple(model.records()) if isinstance(model, MoEModel) else (),
        environment=environment,
        is_multi_turn=isinstance(model, MultiTurnModel),
        sees_turns=isinstance(model, DialogueVision),
        consults=consults,
        imitates=imitates,
        unmet=lacking,
        absent=(*(absent_of_rewards(recipe, plugins, rewards) if uses_rewards else ()), *absent_gpus(recipe, plugins)),
        frozen=frozen_facts(job, plugins, (model, facts), dataset, sizes["train"]),
        omitted={split: dataset.omitted(split) for split in sizes} if hasattr(dataset, "omitted") else {},
    )
