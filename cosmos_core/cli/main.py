"""The entry point `cosmos`: imports the application, and what a run's processes are forked from beside it."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Sequence
from typing import Final, NoReturn

_STARTS_NOTHING: Final = {"-h", "--help", "--dry-run"}


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a command line, by default this process's, and exit."""
    # Typer reads it when it is imported; without rich it starts in half the time.
    os.environ.setdefault("TYPER_USE_RICH", "0")
    # Nothing that imports make is garbage, and looking for some takes a tenth of their time.
    gc.disable()
    try:
        if arguments is None and sys.argv[1:2] == ["run"] and not _STARTS_NOTHING.intersection(sys.argv):
            from cosmos_core.run import fork_server  # noqa: PLC0415

            fork_server.begin_early()
        from cosmos_core.cli.application import call  # noqa: PLC0415

        gc.enable()
        call(arguments)
    except SystemExit as end:
        # Typer ends in silence. Runs answer Ctrl-C themselves, once they have begun.
        if isinstance(getattr(end.__context__, "__cause__", None), KeyboardInterrupt):
            _say_interrupted()
        raise
    except KeyboardInterrupt:
        _say_interrupted()
        sys.exit(130)


def _say_interrupted() -> None:
    sys.stderr.write("cosmos: stopped by Ctrl-C\n")
