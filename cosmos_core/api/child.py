"""A run as a process beside a script or a notebook: `python -m cosmos_core.api.child ORDER`.

It is `cosmos run` or `cosmos plan` of a recipe that is given as data. It ends, with a checkpoint, when whoever started
it does. A refusal is written beside the order, for the caller to raise.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any, Final

from cosmos_core.errors import CosmosError
from cosmos_core.run.interrupts import insistent

REFUSAL: Final = "refusal.json"


def main(order: Path) -> None:
    """Do what the order says: `overwrite` is null of a plan. SIGTERM interrupts it, as Ctrl-C does a command."""
    try:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        threading.Thread(target=_stop_with_caller, name="caller", daemon=True).start()
        told: dict[str, Any] = json.loads(order.read_text(encoding="utf-8"))
        with insistent(number=signal.SIGTERM):
            # The caller takes a name of this module, and waits for its imports.
            if told["overwrite"] is not None:
                from cosmos_core.run import fork_server  # noqa: PLC0415

                fork_server.begin_early()
            from cosmos_core.config.loading import recipe_from  # noqa: PLC0415
            from cosmos_core.observe.output import console  # noqa: PLC0415

            recipe, place = recipe_from(told["recipe"]), Path(told["folder"]) / "recipe.toml"
            if told["overwrite"] is None:
                from cosmos_core.run.plan import show_plan  # noqa: PLC0415

                show_plan(recipe, place, console())
            else:
                from cosmos_core.run.command import run_recipe  # noqa: PLC0415

                run_recipe(recipe, place, console(), overwrite=told["overwrite"])
    except KeyboardInterrupt:
        sys.exit(130)
    except CosmosError as error:
        words = json.dumps({"kind": type(error).__name__, "words": str(error)})
        order.with_name(REFUSAL).write_text(words, encoding="utf-8")
        sys.exit(1)


def _stop_with_caller() -> None:
    """Stop the run when the caller's process ends, of which the end of standard input tells."""
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
