"""The entry point `cosmos`: imports the application, and what a run's processes are forked from beside it."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Sequence
from typing import Final, NoReturn

_STARTS_NOTHING: Final = {"-h", "--help", "--dry-run"}


class _Interrupted(KeyboardInterrupt):
    """Ctrl-C, by a name of its own: by the other, within `exec`, Python would end by the signal, whatever the code."""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a command line, by default this process's, and exit."""
    # Typer reads it when it is imported; without rich it starts in half the time.
    os.environ.setdefault("TYPER_USE_RICH", "0")
    # Nothing that imports make is garbage, and looking for some takes a tenth of their time.
    gc.disable()
    try:
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, _interrupt)
        from cosmos_core.run.interrupts import insistent  # noqa: PLC0415

        with insistent():
            if arguments is None and sys.argv[1:2] == ["run"] and not _STARTS_NOTHING.intersection(sys.argv):
                from cosmos_core.run import fork_server  # noqa: PLC0415

                fork_server.begin_early()
            from cosmos_core.cli.application import call  # noqa: PLC0415

            gc.enable()
            call(arguments)
    except (SystemExit, KeyboardInterrupt) as end:
        # Typer makes a silent end of it. Runs answer Ctrl-C themselves, once they have begun.
        causes = (end, getattr(end.__context__, "__cause__", None))
        if not any(isinstance(each, KeyboardInterrupt) for each in causes):
            raise
        sys.stderr.write("cosmos: stopped by Ctrl-C\n")
        sys.exit(130)


def _interrupt(*_: object) -> NoReturn:
    raise _Interrupted
