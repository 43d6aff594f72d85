"""`cosmos plan`: everything about a run is checked and printed, and nothing is started."""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

import zmq
from rich.console import Console

from cosmos_core.config.schema import Recipe
from cosmos_core.errors import ConfigError, TransportError
from cosmos_core.run.launch.launcher import capabilities_of
from cosmos_core.storage.scratch import scratch
from cosmos_core.transport import sockets


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
    from cosmos_core.run.planning.tables import print_plan  # noqa: PLC0415
    from cosmos_core.run.submit import submission_notes  # noqa: PLC0415

    with scratch("plan") as staging:
        plan = make_plan(recipe, recipe_path, staging)
        notes: Sequence[str] = ()
        if capabilities_of(recipe, plan.plugins).submits:
            notes = submission_notes(plan)
        else:
            check_port(recipe)
        print_plan(plan, console)
        for note in notes:
            console.print(note, highlight=False, markup=False, soft_wrap=True)


def check_port(recipe: Recipe) -> None:
    """Find out now, not after seconds of start-up, that the controller could not listen."""
    try:
        with zmq.Context() as context:
            sockets.router(context, recipe.control.bind, recipe.control.port).close()
    except TransportError as error:
        raise ConfigError(f"control.bind, control.port: {error}") from error
