"""A plan as tables for people: what will run, how much of it, and what it needs."""

from __future__ import annotations

import os
from collections.abc import Iterator

from rich.console import Console
from rich.table import Table
from rich.text import Text

from cosmos_core.config.checks import staleness_bound
from cosmos_core.config.schema import MeshConfig
from cosmos_core.config.structure import unstructure
from cosmos_core.run.checks import Parts
from cosmos_core.run.estimate import gpus, processes, rollout_memory, sync_bytes
from cosmos_core.run.launch.local import visible_gpus
from cosmos_core.run.memory import RankMemory, policy_memory
from cosmos_core.run.plan import Plan

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def print_plan(plan: Plan, console: Console) -> None:
    """Print everything about a planned run."""
    job = plan.job
    console.print(Text.assemble(("Plan of ", ""), (job.recipe.run.name, "bold"), (f"  →  {job.directory}", "dim")))
    for table in (_parts(plan), _batches(plan), _processes(plan), _memory(plan), _weights(plan)):
        console.print()
        console.print(table)


def size(num_bytes: float) -> str:
    """Bytes for people."""
    for unit in _UNITS:
        if num_bytes < 1024 or unit == _UNITS[-1]:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    raise AssertionError


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, header_style="dim")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _parts(plan: Plan) -> Table:
    recipe, parts = plan.job.recipe, plan.parts
    facts = parts.facts
    table = _table("Parts", "kind", "name", "distribution", "what")
    described = {
        ("model", recipe.model.plugin): (
            f"{facts.architecture}, {facts.num_parameters / 1e6:,.3f} M parameters, {facts.num_layers} layers x "
            f"{facts.hidden_size}, vocabulary {facts.vocab_size}, context {facts.context_length}"
        ),
        ("dataset", recipe.dataset.plugin): _rows(parts),
    }
    described |= {("algorithm", stage.plugin): capable.source for stage, capable in parts.stages}
    described |= {("reward", config.plugin): f"weight {config.weight:g}" for config in recipe.reward}
    for record in plan.plugins:
        what = described.get((record.kind, record.name), "")
        table.add_row(record.kind, record.name, f"{record.distribution} {record.version}", what)
    return table


def _rows(parts: Parts) -> str:
    measured = parts.measured
    told = f"{parts.num_train_rows:,} train rows, {parts.num_heldout_rows:,} held out"
    if not measured.num_unusable:
        return told
    return f"{told}; {measured.num_unusable} of {measured.num_rows} looked at cannot be used: {measured.fault}"


def _batches(plan: Plan) -> Table:
    recipe = plan.job.recipe
    table = _table("Batches", "stage", "steps", "prompts a step", "samples a step", "at most units a step", "epochs")
    for stage, capable in plan.parts.stages:
        is_rollouts = capable.source == "rollouts"
        samples = stage.prompts_per_step * (recipe.rollout.group_size if is_rollouts else 1)
        epochs = stage.steps * stage.prompts_per_step / plan.parts.num_train_rows
        longest = plan.parts.measured.longest_prompt + recipe.rollout.sampling.max_units
        table.add_row(
            stage.plugin,
            f"{stage.first_step + 1}-{stage.last_step}",
            str(stage.prompts_per_step),
            f"{samples}",
            f"{samples * longest:,}" if is_rollouts else "",
            f"{epochs:.2f}",
        )
    return table


def _processes(plan: Plan) -> Table:
    table = _table("Processes", "name", "started as", "processes", "device", "mesh")
    recipe = plan.job.recipe
    meshes = {"policy": recipe.policy.mesh, "rollout": recipe.rollout.mesh}
    for name, module, device, count in processes(recipe, uses_rollouts=plan.job.uses_rollouts):
        mesh = meshes.get(name.partition("-")[0])
        table.add_row(name, f"python -m {module}", str(count), device, "" if mesh is None else _mesh(mesh))
    return table


def _mesh(mesh: MeshConfig) -> str:
    axes = {axis: extent for axis, extent in unstructure(mesh).items() if extent > 1}
    return " x ".join(f"{axis} {extent}" for axis, extent in axes.items()) or "1 process"


def _memory(plan: Plan) -> Table:
    recipe, facts = plan.job.recipe, plan.parts.facts
    table = _table("Memory of one process (estimate)", "replica", "process", "part", "device", "host")
    for column in table.columns[3:]:
        column.justify = "right"
    ranks = list(policy_memory(recipe, facts, publishes=plan.job.uses_rollouts))
    for rank in ranks:
        _add_rank(table, "policy", rank)
    if plan.job.uses_rollouts:
        parts = rollout_memory(recipe, facts, plan.parts.measured.longest_prompt)
        _add_rank(table, "rollout", RankMemory(name="each process", count=1, device=parts, host={}, is_whole=True))
    if not all(rank.is_whole for rank in ranks):
        table.caption = "without activations: the model does not say what it keeps for its backward pass"
    return table


def _add_rank(table: Table, replica: str, rank: RankMemory) -> None:
    name = f"{rank.name} ({rank.count})" if rank.count > 1 else rank.name
    for part, num_bytes in rank.device.items():
        table.add_row(replica, name, part, size(num_bytes), "")
    for part, num_bytes in rank.host.items():
        table.add_row(replica, name, part, "", size(num_bytes))
    sums = (sum(rank.device.values()), sum(rank.host.values()))
    bold = [Text(size(each) if each else "", style="bold") for each in sums]
    table.add_row(replica, name, Text("total", style="bold"), *bold)


def _weights(plan: Plan) -> Table:
    table = _table("Pace", "", "")
    table.show_header = False
    for key, value in _pace(plan):
        table.add_row(Text(key, style="dim"), value)
    return table


def _pace(plan: Plan) -> Iterator[tuple[str, str]]:
    job, recipe = plan.job, plan.job.recipe
    if any(capable.source == "rollouts" for _, capable in plan.parts.stages):
        yield "mode", f"{recipe.sync.mode}, staleness at most {staleness_bound(recipe.sync)}"
    yield "GPUs", _gpus(gpus(recipe, uses_rollouts=job.uses_rollouts))
    if job.uses_rollouts:
        each = sync_bytes(recipe, plan.parts.facts)
        many = f" to each of {recipe.rollout.replicas} replicas" if recipe.rollout.replicas > 1 else ""
        yield "weight sync", f"{size(each)}{many}, every {recipe.sync.interval} step(s), {recipe.sync.transport}"
    yield "evaluation", _evaluation(plan)
    every = recipe.policy.checkpoint.interval
    when = f"every {every} steps, and at the end" if every else "at the end"
    yield "checkpoints", f"{when}, in {job.checkpoints}"
    yield "hooks", ", ".join(recipe.tracking.hooks) or "none"


def _gpus(needed: int) -> str:
    found = len(visible_gpus())
    here = f"this machine has {found}"
    if not found:
        here = f"without any, {needed} processes run on this machine's {os.cpu_count()} CPU cores"
    return f"{needed}, one for each process of a replica; {here}"


def _evaluation(plan: Plan) -> str:
    job, every = plan.job, plan.job.recipe.evaluation.interval
    if not job.num_evaluation_prompts:
        return f"none ({'no held-out rows' if job.recipe.evaluation.prompts else 'evaluation.prompts is 0'})"
    when = f"every {every} steps, before and after" if every else "before and after"
    what = "held-out prompts" if job.recipe.reward else "held-out demonstrations (their loss)"
    lacking = job.recipe.evaluation.prompts - job.num_evaluation_prompts
    return f"{job.num_evaluation_prompts} {what}{', all there are' if lacking else ''}, {when}"
