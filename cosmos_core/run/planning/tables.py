"""Prints a plan as tables: what will run, how much of it, and what it needs."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from cosmos_core.config.checks import staleness_bound
from cosmos_core.config.schema import EnvironmentConfig, MeshConfig, Recipe
from cosmos_core.config.structure import unstructure
from cosmos_core.devices import visible_gpus
from cosmos_core.run.launch.launcher import capabilities_of
from cosmos_core.run.planning.footprint import NO_GPU, machine_memory, memory_by_pool, room, size, verdicts
from cosmos_core.run.planning.memory import RankMemory, longest_sample, version_bytes, whole_over_tp
from cosmos_core.run.planning.parts import Parts
from cosmos_core.run.planning.plan import Plan
from cosmos_core.run.planning.preflight import exposure
from cosmos_core.run.planning.processes import gpus, processes
from cosmos_core.run.planning.weight_transport import transport

_MANY_EPOCHS = 100
_SHOWN = 800
_PART_WIDTH = 26
_SIZE_WIDTH = 13


def print_plan(plan: Plan, console: Console) -> None:
    """Print everything about a planned run."""
    job = plan.job
    console.print(Text.assemble(("Plan of ", ""), (job.recipe.run.name, "bold"), (f"  →  {job.directory}", "dim")))
    for table in (
        _parts(plan),
        *_first_row(plan),
        _batches(plan),
        _processes(plan),
        *_memory(plan, console.width),
        _pairs("Pace", _pace(plan)),
    ):
        console.print()
        console.print(table)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, header_style="dim")
    table.caption_justify = "left"
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _pairs(title: str, rows: Iterable[tuple[str, str]]) -> Table:
    table = _table(title, "", "")
    table.show_header = False
    for key, value in rows:
        table.add_row(Text(key, style="dim"), Text(value))
    return table


def _parts(plan: Plan) -> Table:
    recipe, parts = plan.job.recipe, plan.parts
    facts = parts.facts
    lacking = "\nconfig only: no weights here" if facts.absent_weights else ""
    # Latents are neither drawn from a vocabulary nor held in a context.
    units = "" if facts.latent_size else f", vocabulary {facts.vocab_size}, context {facts.context_length}"
    table = _table("Parts", "kind", "name", "distribution", "what")
    described = {
        plan.plugins.record("model", recipe.model.plugin): (
            f"{facts.architecture}, {facts.num_parameters / 1e6:,.3f} M parameters, {facts.num_layers} layers x "
            f"{facts.hidden_size}{units}{lacking}"
        ),
        plan.plugins.record("dataset", recipe.dataset.plugin): _rows(recipe, parts),
    }
    described |= {plan.plugins.record("algorithm", stage.plugin): capable.source for stage, capable in parts.stages}
    if (environment := recipe.environment) is not None:
        paid = f", weight {environment.weight:g}" if environment.weight else ""
        described[plan.plugins.record("environment", environment.plugin)] = f"up to {environment.max_turns} turns{paid}"
    described |= {plan.plugins.record("reward", config.plugin): f"weight {config.weight:g}" for config in recipe.reward}
    for record in plan.plugins:
        if record.kind == "engine" and not plan.job.uses_rollouts:
            continue  # it never starts
        what = described.get(record, "")
        table.add_row(record.kind, record.name, f"{record.distribution} {record.version}", what)
    for name, what in _beside(plan):
        table.add_row(name, "", "", what)
    return table


def _beside(plan: Plan) -> Iterator[tuple[str, str]]:
    """Notices of the model, and the models that algorithms ask, in words."""
    recipe, parts = plan.job.recipe, plan.parts
    for notice in parts.facts.notices:
        yield "note", escape(notice)
    for role, frozen in parts.frozen.items():
        # What is so of the policy's model has been said.
        yield from ((f"{role}: note", escape(each)) for each in frozen.facts.notices if each not in parts.facts.notices)
    consulted = {role for asked in parts.consults.values() for role in asked}
    for role, config in recipe.frozen.items():
        where = config.path or "the weights that its stage starts from"
        unused = "" if role in consulted else "; not asked with these options, but loaded: remove its table"
        yield role, f"{where}, {config.placement}{unused}"
    if recipe.critic is not None:
        yield "critic", f"a head on {parts.facts.hidden_size} features, lr {recipe.critic.lr:g}"


def _rows(recipe: Recipe, parts: Parts) -> str:
    measured = parts.measured
    told = [f"{parts.num_train_rows:,} train rows, {parts.num_heldout_rows:,} held out"]
    if measured.num_unusable:
        told.append(f"{measured.num_unusable} of {measured.num_rows} looked at cannot be used: {measured.fault}")
    if measured.num_bare and any(capable.source == "demonstrations" for _, capable in parts.stages):
        told.append(
            f"{measured.num_bare} of {measured.num_rows} looked at have no demonstration, the first of them row "
            f"{measured.first_bare} (from 0): they are dropped when their turn comes"
        )
    if measured.num_vetted and measured.num_vetted < parts.num_train_rows:
        told.append(f"of the demonstrations read, {measured.num_vetted} can be learned; the others were not read")
    if measured.num_unfit:
        told.append(f"{measured.num_unfit} of {measured.num_rows} looked at are too short or too long for [dataset]")
    if measured.num_too_long:
        do = "does" if measured.num_too_long == 1 else "do"
        told.append(f"{measured.num_too_long} of {measured.num_rows} looked at {do} not fit {_limit(recipe, parts)}")
    for split, omissions in parts.omitted.items():
        told += [f"{each.num_rows:,} left out of {split}: {each.reason} (first: {each.first})" for each in omissions]
    # Values that were seen may have brackets, which are no markup.
    return escape("; ".join(told))


def _limit(recipe: Recipe, parts: Parts) -> str:
    """The limit of a prompt and what follows it, in words."""
    context, units = parts.facts.context_length, recipe.policy.micro_batch_units
    where = f"the context of {context}" if context <= units else f"policy.micro_batch_units of {units}"
    if any(capable.source == "rollouts" for _, capable in parts.stages):
        return f"{where} with a completion of {recipe.rollout.sampling.max_units}"
    return f"{where} with a demonstration"


def _first_row(plan: Plan) -> Iterator[Table]:
    first = plan.parts.first_row
    if first is None:
        return
    units = f"prompt, {first.num_units} {plan.job.unit}s" if first.num_units else "prompt"
    own = first.completions.keys() & {"demonstration", "reference"}
    known = [(what, text) for what, text in first.completions.items() if first.trials or what in own]
    rows = [(units, first.shown), *known, ("media", ", ".join(first.prompt.media))]
    for trial in first.trials:
        told = [
            f"{name} {'fails: ' + each.detail if each.value is None else f'{each.value:g}'}"
            for name, each in trial.outcomes.items()
        ]
        if own and len({each.value for each in trial.outcomes.values()}) == 1:
            told[-1] += f"; gives {'both' if len(told) == 2 else 'all'} the same: it cannot teach from this row"
        rows.append((f"reward {trial.label}", ", ".join(told)))
    yield _pairs(
        "First row", ((key, value if len(value) <= _SHOWN else f"{value[:_SHOWN]} […]") for key, value in rows if value)
    )


def _batches(plan: Plan) -> Table:
    recipe = plan.job.recipe
    table = _table("Batches", "stage", "steps", "prompts a step", "samples a step", "at most units a step", "epochs")
    repeats: list[str] = []
    for stage, capable in plan.parts.stages:
        is_rollouts = capable.source == "rollouts"
        samples = stage.prompts_per_step * (recipe.rollout.group_size if is_rollouts else 1)
        epochs = stage.steps * stage.prompts_per_step / plan.parts.num_train_rows
        if epochs > _MANY_EPOCHS:
            repeats.append(f"{stage.label} repeats the dataset {epochs:,.0f} times")
        longest = longest_sample(recipe, plan.parts.facts.context_length, plan.parts.measured.longest_prompt)
        table.add_row(
            stage.label,
            f"{stage.first_step + 1}-{stage.last_step}",
            str(stage.prompts_per_step),
            f"{samples}",
            f"{samples * longest:,}" if is_rollouts else "",
            f"{epochs:.2f}",
        )
    if repeats:
        table.caption = "; ".join(repeats)
    return table


def _processes(plan: Plan) -> Table:
    table = _table("Processes", "name", "started as", "processes", "device", "mesh")
    recipe = plan.job.recipe
    meshes = {"policy": recipe.policy.mesh, "rollout": recipe.rollout.mesh}
    rows = processes(recipe, uses_rollouts=plan.job.uses_rollouts)
    for (module, device, count), alike in itertools.groupby(rows, key=lambda row: row[1:]):
        names = [name for name, *_ in alike]
        mesh = meshes.get(names[0].partition("-")[0])
        table.add_row(
            names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}",
            f"python -m {module}",
            str(count) if len(names) == 1 else f"{len(names)} x {count}",
            device,
            "" if mesh is None else _mesh(mesh),
        )
    table.caption = exposure(plan.job) or None
    return table


def _mesh(mesh: MeshConfig) -> str:
    axes = {axis: extent for axis, extent in unstructure(mesh).items() if extent > 1}
    return " x ".join(f"{axis} {extent}" for axis, extent in axes.items()) or "1 process"


def _memory(plan: Plan, width: int) -> Iterator[Table]:
    """A table for each kind of replica, a column for each kind of its processes; more tables if the width is short."""
    columns = max((width - _PART_WIDTH) // _SIZE_WIDTH, 1)
    for pool, ranks in memory_by_pool(plan).items():
        title = f"Memory of one {pool} process (estimate){', by place in the pipeline' if len(ranks) > 1 else ''}"
        for first in range(0, len(ranks), columns):
            yield _memory_of(title, ranks[first : first + columns])


def _memory_of(title: str, ranks: Sequence[RankMemory]) -> Table:
    table = _table(title, "part")
    for rank in ranks:
        heading = f"{rank.name}\n{rank.count} processes" if rank.count > 1 else rank.name
        table.add_column(heading, justify="right", overflow="fold")
    for suffix, held in (("", [rank.device for rank in ranks]), (" (host)", [rank.host for rank in ranks])):
        # The process with most parts has them in order; others lack some.
        names = dict.fromkeys(name for parts in sorted(held, key=len, reverse=True) for name in parts)
        for name in names:
            table.add_row(f"{name}{suffix}", *(size(parts[name]) if name in parts else "" for parts in held))
        if names:
            table.add_row(f"total{suffix}", *(size(sum(parts.values())) for parts in held), style="bold")
    if not all(rank.is_whole for rank in ranks):
        table.caption = "without activations: the model does not say what they take"
    return table


def _pace(plan: Plan) -> Iterator[tuple[str, str]]:
    job, recipe = plan.job, plan.job.recipe
    if any(capable.source == "rollouts" for _, capable in plan.parts.stages):
        yield "mode", f"{recipe.sync.mode}, staleness at most {staleness_bound(recipe.sync)}"
    needed = gpus(recipe, uses_rollouts=job.uses_rollouts)
    submits = capabilities_of(recipe, plan.plugins).submits
    here = "of its launcher's machines" if submits else room(plan, len(visible_gpus()), machine_memory())
    of = "of either pool, in turns" if job.takes_turns else "of a replica"
    yield "GPUs", f"{needed}, one for each process {of}; {here}" if needed else "none: every device is 'cpu'"
    for pool, told in verdicts(plan).items():
        yield f"{pool} memory", f"{told}; {_smaller(pool, recipe)}" if told.endswith(NO_GPU) else told
    kinds = [recipe.policy.optimizer.kind, *([] if recipe.warmup is None else [recipe.warmup.optimizer.kind])]
    if len(set(kinds)) > 1:
        yield "optimizer", f"{kinds[0]}, and {kinds[1]} in the warm-up: memory is that of the one that keeps more"
    if plan.parts.measured.num_with_media and recipe.policy.parallel.recompute != "full":
        yield "not counted", "what towers keep of images and videos; policy.parallel.recompute = 'full' keeps it small"
    if whole := whole_over_tp(recipe.policy, plan.parts.facts):
        told = "; ".join(f"{name}: {count / 1e6:,.3f} M" for name, count in whole.items())
        yield "whole on each of tp", f"{sum(whole.values()) / 1e6:,.3f} M parameters ({told})"
    if job.uses_rollouts:
        each = version_bytes(recipe, plan.parts.facts)
        many = f" to each of {recipe.rollout.replicas} replicas" if recipe.rollout.replicas > 1 else ""
        form = "" if recipe.rollout.quantization == "none" else f", matrices in {recipe.rollout.quantization}"
        yield "weight sync", f"{size(each)}{form}{many}, every {recipe.sync.interval} step(s)"
        yield "weights travel", transport(recipe)
    if recipe.environment is not None:
        yield "dialogues", _dialogues(plan, recipe.environment)
    yield "evaluation", _evaluation(plan)
    every = recipe.policy.checkpoint.interval
    when = f"every {every} steps, and at the end" if every else "at the end"
    yield "checkpoints", f"{when}, in {job.checkpoints}"
    yield "hooks", ", ".join(recipe.tracking.hooks) or "none"
    if plan.parts.facts.absent_weights:
        yield "missing", f"a run would be refused: {plan.parts.facts.absent_weights}"
    for absent in (*plan.parts.preflight.absent.splitlines(), *plan.parts.absent):
        yield "missing here", f"a run on this machine would be refused: {absent}"


def _smaller(pool: str, recipe: Recipe) -> str:
    """Name what would take less memory and is not set by the recipe."""
    lora, recompute = recipe.policy.lora, recipe.policy.parallel.recompute
    if pool == "policy":
        full = {"none": ", or policy.parallel.recompute", "selective": ", or policy.parallel.recompute = 'full'"}
        unset = f"{'' if lora else ', or policy.lora'}{full.get(recompute, '')}"
        return f"it takes less with a larger policy.mesh.dp_shard{unset} (docs/layouts.md)"
    unset = ", or rollout.quantization" if recipe.rollout.quantization == "none" else ""
    return f"it takes less with a larger rollout.mesh.tp{unset}, if the engine has it (docs/engines.md)"


def _dialogues(plan: Plan, environment: EnvironmentConfig) -> str:
    recipe, context = plan.job.recipe, plan.parts.facts.context_length
    longest = longest_sample(recipe, context, plan.parts.measured.longest_prompt)
    turns = environment.max_turns
    samples = recipe.rollout.group_size * max(
        stage.prompts_per_step for stage, capable in plan.parts.stages if capable.source == "rollouts"
    )
    return (
        f"of up to {turns} turns and {turns - 1} observations; the model's own units are at most "
        f"{recipe.rollout.sampling.max_units} a sample, with prompt and observations {longest:,} (in evaluations "
        f"{context:,}); each turn is a request with all units before it as its prompt, up to {samples * turns:,} a step"
    )


def _evaluation(plan: Plan) -> str:
    job, every = plan.job, plan.job.recipe.evaluation.interval
    if not job.num_evaluation_prompts:
        return f"none ({'no held-out rows' if job.recipe.evaluation.prompts else 'evaluation.prompts is 0'})"
    when = f"every {every} steps, before and after" if every else "before and after"
    what = "held-out prompts" if job.recipe.reward_names else "held-out demonstrations (their loss)"
    if job.recipe.reward_names and job.num_measured_prompts:
        what += " (rewards, and their demonstrations' loss)"
    lacking = job.recipe.evaluation.prompts - job.num_evaluation_prompts
    return f"{job.num_evaluation_prompts} {what}{', all there are' if lacking else ''}, {when}"
