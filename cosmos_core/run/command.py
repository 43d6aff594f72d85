"""`cosmos run`: make a new run or resume one, supervise it, and write its summary and report."""

from __future__ import annotations

import gc
import secrets
import shutil
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Final

import attrs
from rich.console import Console

from cosmos_core.config.job import Job, stages
from cosmos_core.config.loading import load_job
from cosmos_core.config.schema import Recipe
from cosmos_core.devices import visible_gpus
from cosmos_core.errors import ConfigError, CosmosError
from cosmos_core.observe.live import make_view
from cosmos_core.plugins.choice import choose
from cosmos_core.plugins.discovery import discover
from cosmos_core.plugins.recipe import load_dataset, selections
from cosmos_core.plugins.selection import PluginSet
from cosmos_core.protocols import Dataset
from cosmos_core.run import folder, provenance
from cosmos_core.run.address import require_gone
from cosmos_core.run.follower import Follower
from cosmos_core.run.fork import in_fork
from cosmos_core.run.hooks import RunHooks
from cosmos_core.run.launch import Launcher
from cosmos_core.run.launch.launcher import capabilities_of, prepare
from cosmos_core.run.metrics import recorded
from cosmos_core.run.plan import check_again, check_port, checked_launcher, make_folder
from cosmos_core.run.planning.changes import changed
from cosmos_core.run.planning.preflight import check_exposed, check_hooks, check_keys
from cosmos_core.run.report.page import write_report
from cosmos_core.run.report.summary import print_summary, summarise
from cosmos_core.run.resume import Start, find_start
from cosmos_core.run.supervisor import Ending, Supervisor

_HOOKS_TIMEOUT_S: Final = 30.0
_SUPERVISED: Final = ("dataset", "launcher", "hook")
"""Kinds of plugins that a supervisor uses itself."""


@attrs.frozen(kw_only=True, eq=False)
class _Session:
    """One session of a run: the job, its plugins and dataset, what happened before, and where to start."""

    job: Job
    plugins: PluginSet
    dataset: Dataset
    launcher: Launcher
    start: Start
    follower: Follower = attrs.field(factory=Follower)
    earlier_s: float = 0.0


def run_recipe(recipe: Recipe, recipe_path: Path | None, console: Console, *, overwrite: bool) -> str:
    """Make a new run and see it through; its outcome: `finished`, `stopped` or `failed`."""
    began = time.monotonic()
    prepare(recipe)
    # What was imported is no garbage when this process ends, either.
    gc.freeze()
    directory = Path(recipe.run.output_dir) / recipe.run.name
    folder.check_free(directory, overwrite=overwrite)
    console.print(f"planning {recipe.run.name}: model, data, rewards", style="dim")
    run_id = f"{recipe.run.name}-{secrets.token_hex(6)}"
    try:
        in_fork(partial(make_folder, recipe, recipe_path, run_id=run_id, overwrite=overwrite))
        with folder.held(directory):
            job = load_job(directory)
            if warmup := stages(recipe)[-1].first_step:
                words = f"{warmup + recipe.run.steps} steps: {warmup} of warm-up, and run.steps = {recipe.run.steps}"
                console.print(words, style="dim", highlight=False)
            plugins = PluginSet.load(selections(job.recipe, _SUPERVISED))
            dataset, launcher = load_dataset(job, plugins), checked_launcher(job, plugins)
            session = _Session(job=job, plugins=plugins, dataset=dataset, launcher=launcher, start=Start())
            return _supervise(session, console, began)
    except (CosmosError, KeyboardInterrupt):
        # The folder may be another session's, and nobody misses a run that has not begun.
        is_own = folder.is_run(directory) and (job := load_job(directory)).run_id == run_id
        if is_own and not job.journal.exists() and folder.read_summary(directory) is None:
            shutil.rmtree(directory, ignore_errors=True)
        raise


def resume_run(directory: Path, console: Console, *, overrides: Sequence[str] = (), start: str | None = None) -> str:
    """Go on with a run from its newest complete checkpoint, or from its start if there is none.

    Args:
        directory: The run's folder.
        console: Told where the run goes on, and what is undone.
        overrides: `KEY=VALUE`, of what may change (see `cosmos_core.run.planning.changes`).
        start: An earlier checkpoint to go on from, `step-N` or `previous`; what came after it is undone.

    Returns:
        Its outcome; a run that has finished stays as it is, unless it gets more steps or goes back.
    """
    began = time.monotonic()
    with folder.held(directory):
        session = _resumed(directory, console, overrides, start)
        return "finished" if session is None else _supervise(session, console, began)


def _resumed(directory: Path, console: Console, overrides: Sequence[str], wanted: str | None) -> _Session | None:
    """The next session of a run, noted in its folder once nothing is left to refuse; None if it has finished."""
    job = load_job(directory)
    require_gone(job)
    recipe, changes = changed(job.recipe, overrides, directory)
    summary = folder.read_summary(directory)
    # Not by the recipe's length before: that may have been changed by a session that did not get far.
    if (
        wanted is None
        and summary is not None
        and summary.outcome == "finished"
        and summary.steps >= stages(recipe)[-1].last_step
    ):
        console.print(
            f"{directory} has finished: {summary.steps} steps. Nothing to resume; --set run.steps adds some.",
            highlight=False,
        )
        return None
    prepare(recipe)
    job = attrs.evolve(job, recipe=recipe)
    check_keys(job)
    is_changed = any(change.is_to_be_checked for change in changes)
    if is_changed or visible_gpus():
        in_fork(partial(check_again, job, is_changed=is_changed))
    installed = discover()
    plugins = PluginSet.load(selections(recipe, _SUPERVISED), records=installed)
    check_exposed(recipe, capabilities_of(recipe, plugins))
    launcher = checked_launcher(job, plugins)
    check_hooks(recipe, plugins)
    dataset = load_dataset(job, plugins)
    follower = Follower()
    start, undone = find_start(job, follower, wanted)
    last = stages(recipe)[-1]
    if start.step is not None and last.last_step < start.step:
        warmup = f" (step {start.step}, less {last.first_step} of the warm-up)" if last.first_step else ""
        raise ConfigError(
            f"run.steps: {recipe.run.steps}, but the newest checkpoint is of step {start.step - last.first_step}"
            f"{warmup}; a run cannot be made shorter than it is"
        )
    check_port(recipe)
    chosen = [choose(kind, name, installed) for kind, name in selections(recipe)]
    differences = provenance.resumed_with(directory, chosen, list(map(str, changes)))
    where = f"Resuming from step {start.step} ({start.checkpoint or 'no checkpoint was saved'})."
    for words in ("The run had not begun: starting it." if start.step is None else where, *undone):
        console.print(words, highlight=False, markup=False)
    if changes:
        job = folder.save(job)
    for words in [*differences, *(words for _, _, words in provenance.sources(job) if words)]:
        console.print(words, highlight=False, markup=False, soft_wrap=True)
    earlier_s = follower.timeline.elapsed_s(None) if summary is None else summary.wall_s
    return _Session(
        job=job,
        plugins=plugins,
        dataset=dataset,
        launcher=launcher,
        start=start,
        follower=follower,
        earlier_s=earlier_s,
    )


def _supervise(session: _Session, console: Console, began: float) -> str:
    """Supervise one session; summary and report are written whatever becomes of it."""
    job = session.job
    (job.directory / folder.SUMMARY).unlink(missing_ok=True)
    follower = session.follower
    view = make_view(console)
    try:
        hooks = RunHooks(job, session.plugins, resumed_from=session.start.step, report=view.say)
        hooks.notify("cosmos_run_started")
        notify = recorded(job.directory, hooks.notify)
        supervisor = Supervisor(job, session.launcher, view, notify, follower)
        try:
            ending = supervisor.run(session.start)
        except CosmosError as error:
            ending = Ending(outcome="failed", reason=str(error))
    finally:
        view.close()
    wall_s = session.earlier_s + time.monotonic() - began
    summary = summarise(job, follower, ending, wall_s=wall_s)
    hooks.notify("cosmos_run_ended", outcome=ending.outcome, summary=summary)
    try:
        folder.write_json(job.directory / folder.SUMMARY, summary)
        write_report(job, follower, summary, session.dataset)
    except OSError as error:
        console.print(f"summary and report could not be written: {error}", highlight=False, markup=False)
    print_summary(summary, job, console)
    for text in hooks.close(_HOOKS_TIMEOUT_S):
        console.print(text, highlight=False, markup=False, soft_wrap=True)
    return ending.outcome
