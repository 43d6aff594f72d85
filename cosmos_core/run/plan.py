"""`cosmos plan`, and what `cosmos run` does first: everything about a run is checked, and nothing is started."""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import zmq
from rich.console import Console

from cosmos_core.config.job import Job
from cosmos_core.config.schema import Recipe
from cosmos_core.devices import visible_gpus
from cosmos_core.errors import ConfigError, TransportError
from cosmos_core.plugins.selection import PluginSet
from cosmos_core.policy.checkpoints.checkpoint import check_writable, completed
from cosmos_core.protocols import Pool
from cosmos_core.protocols.launcher import ClusterLauncher, Submission
from cosmos_core.run import folder, provenance
from cosmos_core.run.fork import in_fork
from cosmos_core.run.launch import Launcher
from cosmos_core.run.launch.launcher import capabilities_of, make_launcher, pools
from cosmos_core.run.planning.preflight import check_gpus, check_keys, check_present, unset_variables
from cosmos_core.scratch import scratch
from cosmos_core.transport import sockets
from cosmos_core.transport.messages import Role

if TYPE_CHECKING:
    from cosmos_core.run.planning.plan import Plan


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Look for no garbage meanwhile, nor ever in what was imported: to look takes a fifth of the time.

    What transformers warns of is left to the logs of the run, whose processes build the same model.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
        logging.getLogger("transformers").addHandler(logging.NullHandler())


def show_plan(recipe: Recipe, recipe_path: Path | None, console: Console) -> None:
    """Validate everything and print the plan; nothing is left behind; raises CosmosError if the recipe cannot run."""
    with importing():
        from cosmos_core.run.planning.plan import make_plan  # noqa: PLC0415 - imports torch
    from cosmos_core.run.planning.footprint import planned_pools  # noqa: PLC0415
    from cosmos_core.run.planning.tables import print_plan  # noqa: PLC0415

    with scratch("plan") as staging:
        plan = make_plan(recipe, recipe_path, staging)
        notes: Sequence[str] = ()
        if capabilities_of(recipe, plan.plugins).submits:
            _, submission = rendered(plan.job, plan.plugins, planned_pools(plan))
            notes = (*submission.notes, *unset_there(plan, submission))
        else:
            check_port(recipe)
        print_plan(plan, console)
        for note in notes:
            console.print(note, highlight=False, markup=False, soft_wrap=True)


def rendered(job: Job, plugins: PluginSet, found: Sequence[Pool]) -> tuple[ClusterLauncher, Submission]:
    """A launcher that submits, and what it submits; raises a ConfigError if the run does not fit its machines."""
    launcher = make_launcher(job.recipe, job.directory, plugins, found)
    if not isinstance(launcher, ClusterLauncher):
        raise ConfigError(
            f"launch.launcher: {job.recipe.launch.launcher!r} declares that it submits runs, and has no render, ready "
            "and submit"
        )
    return launcher, launcher.render()


def unset_there(plan: Plan, submission: Submission) -> tuple[str, ...]:
    """Variables that the run needs and a submission does not bring, in words; the machines may have them besides."""
    if submission.variables is None:
        return ()
    launcher = plan.job.recipe.launch.launcher
    return tuple(
        f"{who}: {' and '.join(names)}: not among the variables that launcher {launcher!r} gives the run's processes; "
        "set them in launch.options, unless they are there already"
        for who, names in unset_variables(plan.job, plan.plugins, submission.variables).items()
    )


def make_folder(recipe: Recipe, recipe_path: Path | None, *, run_id: str, overwrite: bool) -> None:
    """Plan a run, and make its folder once nothing is left to refuse."""
    with importing():
        from cosmos_core.run.planning.footprint import check_gpu_memory  # noqa: PLC0415 - imports torch
        from cosmos_core.run.planning.plan import make_plan  # noqa: PLC0415

    with scratch("plan") as staging:
        plan = make_plan(recipe, recipe_path, staging)
        check_keys(plan.job)
        checked_launcher(plan.job, plan.plugins)
        check_present(plan.parts)
        check_gpu_memory(plan)
        check_port(recipe)
        if (url := recipe.policy.checkpoint.url) is not None:
            # The oldest of all are removed, and the newest goes on.
            check_writable(url)
            if steps := completed(url):
                raise ConfigError(
                    f"policy.checkpoint.url: {url} has {len(steps)} checkpoints already, the newest of step {steps[-1]}"
                    ", which a new run would take for its own; choose another folder, or remove them"
                )
        job = attrs.evolve(plan.job, run_id=run_id)
        folder.create(job, plan.assets, provenance.made_with(plan.plugins, plan.assets), overwrite=overwrite)


def check_again(job: Job, *, is_changed: bool = False, joins: Role | None = None) -> None:
    """Check a run that goes on, or one replica of a role that `joins` it; raises CosmosError if it cannot run here.

    Its GPUs are: others may use them by now. If its recipe `is_changed`, all that the recipe changes is.
    """
    with importing():
        from cosmos_core.run.planning.footprint import check_gpu_memory  # noqa: PLC0415 - imports torch
        from cosmos_core.run.planning.plan import check_changed, plan_again  # noqa: PLC0415

    check_gpu_memory(check_changed(job) if is_changed else plan_again(job), joins)


def check_joins(job: Job, role: Role) -> None:
    """Refuse to start one replica of a role, which joins a run, if this machine's GPUs cannot run it."""
    check_gpus(job.recipe, role)
    if visible_gpus():
        in_fork(partial(check_again, job, joins=role))


def checked_launcher(job: Job, plugins: PluginSet) -> Launcher:
    """The launcher of the run's processes, once it is known that it can start them from here."""
    if not capabilities_of(job.recipe, plugins).submits:
        check_gpus(job.recipe)
    launcher = make_launcher(job.recipe, job.directory, plugins, pools(job.recipe, uses_rollouts=job.uses_rollouts))
    launcher.check()
    return launcher


def check_port(recipe: Recipe) -> None:
    """Find out now, not after seconds of start-up, that the controller could not listen."""
    try:
        with zmq.Context() as context:
            sockets.router(context, recipe.control.bind, recipe.control.port).close()
    except TransportError as error:
        raise ConfigError(f"control.bind, control.port: {error}") from error
