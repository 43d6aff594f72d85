"""A whole run of a hook in a process of its own: `python -m cosmos_core.testing.conformance.hook.process JSON`.

Prints one line of JSON when the run is over, and must then be able to end.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Final

import attrs
import msgspec
import psutil

from cosmos_core.protocols import RunInfo
from cosmos_core.testing.conformance.hook import story
from cosmos_core.testing.conformance.hook.session import HookSession
from cosmos_core.types import JSON

_GONE_S: Final = 5.0


@attrs.frozen(kw_only=True)
class Order:
    """What to run.

    Attributes:
        plugin: The hook's name in recipes.
        options: Its options.
        run_id: Of the run, like the following ones.
        name: Name of the run.
        directory: The run's folder.
        recipe: The run's recipe.
        timeout_s: Longest time for one call.
    """

    plugin: str
    options: Mapping[str, JSON]
    run_id: str
    name: str
    directory: str
    recipe: Mapping[str, JSON]
    timeout_s: float


@attrs.frozen(kw_only=True)
class Left:
    """What was there when the run was over.

    Attributes:
        ended_at: Unix time.
        threads: Names of threads that Python waits for at its end.
        processes: Command lines of child processes.
    """

    ended_at: float
    threads: list[str]
    processes: list[str]


def main(order: Order) -> None:
    """Follow a run to its end and tell what is left."""
    run = RunInfo(run_id=order.run_id, name=order.name, directory=Path(order.directory), recipe=order.recipe)
    session = HookSession(order.plugin, order.options, run, timeout_s=order.timeout_s)
    session.tell(chain(story.beginning(), story.steps(1, 3), story.ending("finished")))
    session.close()
    left = Left(ended_at=time.time(), threads=_threads(), processes=_processes())
    sys.stdout.write(f"\n{msgspec.json.encode(left).decode()}\n")
    sys.stdout.flush()


def _threads() -> list[str]:
    return [each.name for each in threading.enumerate() if not each.daemon and each is not threading.main_thread()]


def _processes() -> list[str]:
    end = time.monotonic() + _GONE_S
    while (children := psutil.Process().children(recursive=True)) and time.monotonic() < end:
        psutil.wait_procs(children, timeout=0.1)
    return [" ".join(child.cmdline()) or f"process {child.pid}" for child in children]


if __name__ == "__main__":
    main(msgspec.json.decode(sys.argv[1], type=Order))
