"""`python -m cosmos_launcher_kubernetes.controller RECIPE`: what runs in the controller's pod.

It makes the recipe's run on the shared volume, or goes on with it if it is there: a pod that was moved or restarted
does what the first one did. Its exit code says what is to become of the JobSet (`manifest.py`):

0     the run has finished, or a person stopped it (SIGINT): the JobSet has succeeded
1, 2  the run has failed, or its recipe was refused: the JobSet has failed, and does not start anew
3     a run that is there cannot go on now; its last controller may not have ended yet: the JobSet starts anew
143   Kubernetes asked the pod to end (SIGTERM), and the run was stopped with a checkpoint: the JobSet starts anew
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from rich.console import Console

from cosmos_core.config.loading import load_recipe
from cosmos_core.errors import CosmosError
from cosmos_core.run import folder
from cosmos_core.run.command import resume_run, run_recipe
from cosmos_launcher_kubernetes.manifest import FAILED, REFUSED

_AGAIN: Final = 3
_ASKED: Final = 128 + signal.SIGTERM


def main(arguments: Sequence[str]) -> int:
    """Supervise the run; the exit code."""
    recipe_path = Path(arguments[0])
    console = Console(width=120)
    refused = REFUSED
    with _signals() as received:
        try:
            recipe = load_recipe(recipe_path)
            directory = Path(recipe.run.output_dir) / recipe.run.name
            if folder.is_run(directory):
                refused = _AGAIN
                # The controller of an earlier pod is gone, and a process of this pod may have its number.
                (directory / "controller.json").unlink(missing_ok=True)
                outcome = resume_run(directory, console)
            else:
                outcome = run_recipe(recipe, recipe_path, console, overwrite=False)
        except CosmosError as error:
            console.print(f"cosmos: {error}", highlight=False, markup=False, soft_wrap=True)
            return refused
        except KeyboardInterrupt:
            return 0
        if outcome == "stopped":
            return _ASKED if signal.SIGTERM in received() else 0
        return 0 if outcome == "finished" else FAILED


@contextlib.contextmanager
def _signals() -> Iterator[Callable[[], bytes]]:
    """Tell which signals came: the supervisor takes each of them for one request to stop."""
    receiving, sending = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    earlier = signal.set_wakeup_fd(sending, warn_on_full_buffer=False)

    def received() -> bytes:
        try:
            return os.read(receiving, 1 << 16)
        except BlockingIOError:
            return b""

    try:
        yield received
    finally:
        signal.set_wakeup_fd(earlier)
        os.close(receiving)
        os.close(sending)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
