"""`train` and `plan`: a recipe from a file or as data, functions in the place of plugins, changes by keyword."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from cosmos_core.api.functions import reference
from cosmos_core.api.process import Child, in_python
from cosmos_core.config.loading import read_toml, recipe_from
from cosmos_core.config.overrides import apply_selections, assign
from cosmos_core.config.sources import located
from cosmos_core.errors import ConfigError, CosmosError
from cosmos_core.run import folder
from cosmos_core.run.interrupts import insistent
from cosmos_core.scratch import scratch

if TYPE_CHECKING:
    from cosmos_core.api.run import Run

Recipe: TypeAlias = str | Path | Mapping[str, Any]
Plugin: TypeAlias = str | Callable[..., Any]
_POLL_S: Final = 0.05


def train(
    recipe: Recipe,
    *,
    model: str | None = None,
    algorithm: Plugin | None = None,
    dataset: Plugin | None = None,
    reward: Plugin | Sequence[Plugin] | None = None,
    environment: Plugin | None = None,
    overwrite: bool = False,
    **overrides: Any,
) -> Run:
    """Start a run; it goes on beside this process, and `Run.wait` waits for it.

    Args:
        recipe: A TOML file, or what would be in one. Relative paths start at the file's folder, or the current one.
        model: Name of the model plugin.
        algorithm: Name of the algorithm plugin, or a class.
        dataset: Name of the dataset plugin, or a function that gives rows.
        reward: Name of a reward plugin, a function, or several of these.
        environment: Name of the environment plugin, or a class.
        overwrite: Whether a run of this name is replaced.
        overrides: Other keys of the recipe, `__` for a dot: `policy__optimizer__lr=1e-4`; also as `**{"run.steps": 9}`.
            Of a table, `run={"steps": 9}`, the recipe keeps the keys that are not given.

    Returns:
        The run, once it is planned and nothing is left to refuse.

    Raises:
        CosmosError: The recipe cannot run, as `cosmos plan` would say.
        KeyboardInterrupt: Ctrl-C; nothing is left of a run that had not begun.
    """
    named = {"model": model, "algorithm": algorithm, "dataset": dataset, "reward": reward, "environment": environment}
    child, directory, before = _begun(recipe, named, overrides, overwrite=overwrite)
    try:
        with insistent():
            from cosmos_core.api.run import Run  # noqa: PLC0415 - while the child starts

            while not child.has_ended and _made(directory) in (None, before):
                time.sleep(_POLL_S)
    except (KeyboardInterrupt, SystemExit) as end:
        # Nobody would have the run; the child removes what has not begun.
        child.interrupt()
        with contextlib.suppress(CosmosError, KeyboardInterrupt):
            child.wait()
        raise end.with_traceback(None) from None
    if child.has_ended and child.wait():
        raise KeyboardInterrupt
    return Run(directory, child)


def plan(
    recipe: Recipe,
    *,
    model: str | None = None,
    algorithm: Plugin | None = None,
    dataset: Plugin | None = None,
    reward: Plugin | Sequence[Plugin] | None = None,
    environment: Plugin | None = None,
    **overrides: Any,
) -> None:
    """Check everything about a run without starting it, and print what would run; see `train`."""
    named = {"model": model, "algorithm": algorithm, "dataset": dataset, "reward": reward, "environment": environment}
    child, _, _ = _begun(recipe, named, overrides, overwrite=None)
    if child.wait():
        raise KeyboardInterrupt


def _begun(
    recipe: Recipe, named: Mapping[str, Any], overrides: Mapping[str, Any], *, overwrite: bool | None
) -> tuple[Child, Path, tuple[int, int] | None]:
    """The process of a run, or of a plan (`overwrite` is None); the run's folder, and the job that was there before."""
    with contextlib.ExitStack() as stack:
        place = stack.enter_context(scratch("api"))
        try:
            order = _order(recipe, named, overrides, place)
            run = recipe_from(order["recipe"], _refuse).run
            directory = Path(run.output_dir) / run.name
            if overwrite is not None:
                folder.check_free(directory, overwrite=overwrite)
        except ConfigError as error:
            raise ConfigError(in_python(str(error))) from None
        except KeyboardInterrupt as end:
            raise end.with_traceback(None) from None
        before = _made(directory)
        return Child(order | {"overwrite": overwrite}, stack.pop_all(), place), directory, before


def _refuse(data: Mapping[str, Any], error: ConfigError) -> None:
    from cosmos_core.plugins.recipe import check_plugins  # noqa: PLC0415 - where a recipe is refused

    check_plugins(data, error)


def _order(recipe: Recipe, named: Mapping[str, Any], overrides: Mapping[str, Any], place: Path) -> dict[str, Any]:
    """The recipe as plain data, and the folder that its paths start at."""
    file = Path(recipe) if isinstance(recipe, str | Path) else None
    at = Path.cwd() if file is None else file.parent.absolute()
    try:
        data = json.loads(json.dumps(recipe)) if file is None else read_toml(file)
    except TypeError as error:
        raise ConfigError(f"recipe: {error}; give text, numbers, truth values, lists and dictionaries") from None
    chosen: dict[str, str | Sequence[str]] = {}
    for kind, value in named.items():
        if value is not None:
            several = value if isinstance(value, list | tuple) else [value]
            named_here = [reference(each, place) for each in several]
            chosen[kind] = named_here if kind == "reward" else named_here[0]
    data = located(data, at)
    apply_selections(data, chosen)
    for key, value in overrides.items():
        assign(data, key.replace("__", "."), value)
    return {"recipe": located(data, Path.cwd()), "folder": str(at)}


def _made(directory: Path) -> tuple[int, int] | None:
    """The job of a run in a folder, as a file: another one after a run was made there."""
    with contextlib.suppress(OSError):
        found = (directory / "job.json").stat()
        return found.st_ino, found.st_mtime_ns
    return None
