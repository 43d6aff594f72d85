"""Plans a run here, and hands it over to a cluster."""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import attrs
from rich.console import Console

from cosmos_core.config.checks import is_loopback
from cosmos_core.config.loading import load_job
from cosmos_core.config.overrides import apply_override
from cosmos_core.config.schema import Recipe
from cosmos_core.errors import ConfigError, CosmosError, UnknownSubmissionError
from cosmos_core.plugins.choice import choose_all
from cosmos_core.plugins.discovery import discover
from cosmos_core.plugins.recipe import files, selections
from cosmos_core.plugins.selection import PluginSet
from cosmos_core.protocols import Kind, LauncherCapabilities
from cosmos_core.protocols.launcher import ClusterLauncher, Submission
from cosmos_core.run import folder, provenance
from cosmos_core.run.address import require_gone
from cosmos_core.run.launch.launcher import capabilities_of, pools
from cosmos_core.run.plan import rendered, unset_there
from cosmos_core.run.planning.footprint import planned_pools
from cosmos_core.run.planning.plan import check_changed, make_plan
from cosmos_core.run.planning.preflight import check_present, exposure
from cosmos_core.scratch import scratch

_ONLY: Final[tuple[Kind, ...]] = ("launcher",)
_EVERYWHERE: Final = "0.0.0.0"  # noqa: S104 - what replicas on other hosts must reach


def launch_recipe(
    recipe: Recipe, recipe_path: Path | None, console: Console, *, render_only: bool = False, overwrite: bool = False
) -> None:
    """Make a new run's folder, where the launcher's machines see it, and submit the run.

    With `render_only`, print what would be submitted, and leave nothing behind.
    """
    recipe = reachable(recipe)
    directory = Path(recipe.run.output_dir) / recipe.run.name
    plugins = PluginSet.load(selections(recipe, _ONLY))
    capable = _capable(recipe, plugins)
    if capable.shares_folder:
        # What is only read may be for another machine, whose folders are not here.
        (folder.check_unused if render_only else folder.check_free)(directory, overwrite=overwrite)
    else:
        if named := files(recipe):
            raise ConfigError(
                f"plugin: {', '.join(named)}: launcher {recipe.launch.launcher!r} makes the run's folder where these "
                "files are not; make a package of each with cosmos plugins new, and install it there"
            )
        _check_elsewhere(recipe, overwrite=overwrite)
    with scratch("plan") as staging:
        plan = make_plan(recipe, recipe_path, staging)
        launcher, submission = rendered(plan.job, plugins, planned_pools(plan))
        unset = unset_there(plan, submission)
        if render_only:
            console.file.write(submission.text)
            for each in unset:
                _say(Console(stderr=True), each)
            return
        launcher.ready()
        for each in (exposure(plan.job), *unset):
            _say(console, each)
        if not capable.shares_folder:
            with scratch("launch") as place:
                _submit(launcher, submission, place, console)
            return
        check_present(plan.parts)
        folder.check_free(directory, overwrite=overwrite)
        with _aside(directory) as kept:
            if kept is not None:
                _say(console, f"The earlier run is kept in {kept} until this one is submitted")
            folder.create(plan.job, plan.assets, provenance.made_with(plan.plugins, plan.assets), overwrite=False)
            try:
                _submit(launcher, submission, directory, console)
            except UnknownSubmissionError:
                raise
            except CosmosError:
                # Nothing of it has run: the name is free for the next attempt.
                shutil.rmtree(directory, ignore_errors=True)
                raise


@contextlib.contextmanager
def _aside(directory: Path) -> Iterator[Path | None]:
    """Keep the run in a folder, if there is one, beside it until another one has its place for certain.

    A `CosmosError` of the block puts it back in place of what the block has made there; after any other error,
    `UnknownSubmissionError` among them, both stay. Once the block has ended well, the earlier run is removed.

    Yields:
        Where the run is kept; None if there is none.

    Raises:
        ConfigError: The run goes on, or could not be moved or removed.
        UnknownSubmissionError: Of the block; it says besides where the earlier run is.
    """
    kept = None
    if folder.is_run(directory):
        with folder.held(directory):
            require_gone(load_job(directory))
            try:
                kept = Path(tempfile.mkdtemp(prefix=f"{directory.name}.replaced-", dir=directory.parent))
                directory.rename(kept)
            except OSError as error:
                raise ConfigError(f"{directory}: the run cannot be moved aside: {error}") from error
    try:
        yield kept
    except UnknownSubmissionError as error:
        if kept is None:
            raise
        raise UnknownSubmissionError(f"{error}. The run that it replaces is in {kept}") from error
    except CosmosError:
        if kept is not None:
            shutil.rmtree(directory, ignore_errors=True)
            kept.rename(directory)
        raise
    try:
        if kept is not None:
            shutil.rmtree(kept)
    except OSError as error:
        raise ConfigError(
            f"{kept}: the run was submitted, and the one that it replaces could not be removed: {error}; remove it"
        ) from error


def launch_again(
    directory: Path, launcher: str, overrides: list[str], console: Console, *, render_only: bool = False
) -> None:
    """Submit a run that is there: it goes on where it stopped."""
    from cosmos_core.run.planning.changes import changed  # noqa: PLC0415 - only here

    job = load_job(directory)
    recipe, changes = changed(job.recipe, [f"launch.launcher={json.dumps(launcher)}", *overrides], directory)
    job = attrs.evolve(job, recipe=reachable(recipe))
    plugins = PluginSet.load(selections(job.recipe, _ONLY))
    if not _capable(job.recipe, plugins).shares_folder:
        raise ConfigError(f"--resume: launcher {launcher!r} makes the run's folder itself; give it the recipe instead")
    found, submission = rendered(job, plugins, pools(job.recipe, uses_rollouts=job.uses_rollouts))
    if render_only:
        console.file.write(submission.text)
        return
    found.ready()
    _say(console, exposure(job))
    with folder.held(directory):
        # The session on the cluster sees the changed recipe alone, and a run's copies in place of a mended file.
        if any(change.is_to_be_checked for change in changes):
            check_changed(job)
            chosen = choose_all(selections(job.recipe), discover()).values()
            for words in provenance.resumed_with(directory, chosen, list(map(str, changes))):
                _say(console, words)
        folder.save(job)
    _submit(found, submission, directory, console)


def reachable(recipe: Recipe) -> Recipe:
    """A recipe whose processes listen where other hosts reach them; what is bound to loopback alone is opened."""
    if not is_loopback(recipe.control.bind):
        return recipe
    return attrs.evolve(recipe, control=attrs.evolve(recipe.control, bind=_EVERYWHERE))


def option_overrides(launcher: str, arguments: list[str]) -> list[str]:
    """`--gpus-per-node 8` or `--gpus-per-node=8`, of a launcher's own options, as overrides of `launch.options`."""
    options: type[Any] = PluginSet.load([("launcher", launcher)]).provider("launcher", launcher).options
    are_words = {field.name: field.type in ("str", "str | None", str, str | None) for field in attrs.fields(options)}
    data: dict[str, Any] = {}
    overrides = []
    waiting = list(arguments)
    while waiting:
        word, separator, value = waiting.pop(0).partition("=")
        if not word.startswith("--"):
            raise ConfigError(f"{word}: unexpected; options of the launcher are written --name VALUE")
        if not separator:
            if not waiting:
                raise ConfigError(f"{word}: expected a value, for example {word} VALUE")
            value = waiting.pop(0)
        name = word.removeprefix("--").replace("-", "_")
        quoted = json.dumps(value, ensure_ascii=False) if are_words.get(name) else value
        override = f"launch.options.{name}={quoted}"
        apply_override(data, override)
        overrides.append(override)
    return overrides


def _check_elsewhere(recipe: Recipe, *, overwrite: bool) -> None:
    """Refuse what can only be seen where the run's folder will be made, by a ConfigError."""
    if overwrite:
        raise ConfigError(
            f"--overwrite: launcher {recipe.launch.launcher!r} makes the run's folder itself, and goes on with a run "
            "that is there; remove that, or choose another --name"
        )
    keys = recipe.control.keys
    if keys is not None and not Path(keys).is_absolute():
        raise ConfigError(
            f"control.keys: {keys!r} is a path from the recipe's folder, which launcher {recipe.launch.launcher!r} "
            "does not share with the run; give the absolute path that the keys have where the run's processes are (on "
            "a volume that they share, for example), or leave it out: the run then makes its own"
        )


def _capable(recipe: Recipe, plugins: PluginSet) -> LauncherCapabilities:
    capable = capabilities_of(recipe, plugins)
    if not capable.submits:
        raise ConfigError(
            f"launch.launcher: {recipe.launch.launcher!r} starts processes on this machine and hands nothing over; "
            "use cosmos run"
        )
    return capable


def _submit(launcher: ClusterLauncher, submission: Submission, place: Path, console: Console) -> None:
    file = place / submission.name
    try:
        file.write_text(submission.text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{file}: cannot be written: {error.strerror}") from error
    for note in submission.notes:
        _say(console, note)
    _say(console, launcher.submit(file))


def _say(console: Console, words: str) -> None:
    if words:
        console.print(words, highlight=False, markup=False, soft_wrap=True)
