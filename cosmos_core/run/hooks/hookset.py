"""The lifecycle hooks that a recipe names, made and attached to a run's plugin manager."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, Final, TypeVar

from cosmos_core.config.job import Job
from cosmos_core.config.structure import unstructure
from cosmos_core.errors import PluginBrokenError
from cosmos_core.plugins.selection import PluginSet
from cosmos_core.protocols import RunInfo
from cosmos_core.run.hooks.runner import HookRunner

T = TypeVar("T")

_MAKE_S: Final = 60.0


def make_in_time(name: str, make: Callable[[], T], timeout_s: float) -> T:
    """Make the hook `name`, or refuse it: a hook that blocks when it is made must not hold up the run's start.

    Raises:
        PluginBrokenError: It takes longer than `timeout_s`, or raises what would end the process.
        Exception: What `make` raises.
    """
    made: Future[T] = Future()

    def run() -> None:
        try:
            made.set_result(make())
        except Exception as error:  # noqa: BLE001 - it is raised again in the thread that waits
            made.set_exception(error)
        except BaseException as error:  # noqa: BLE001 - raised there, SystemExit would end the run without a word
            why = f"hook {name!r} could not be made: {type(error).__name__}: {error}"
            made.set_exception(PluginBrokenError(why))

    threading.Thread(target=run, name=f"hook:{name}:make", daemon=True).start()
    wait([made], timeout_s)
    if made.done():
        return made.result()
    raise PluginBrokenError(
        f"hook {name!r} was not made within {timeout_s:g} s; do slow work in cosmos_run_started, which is called "
        "beside the run, not in Provider.create"
    )


class RunHooks:
    """Calls the hooks of a run, each with the run's `RunInfo`."""

    def __init__(
        self, job: Job, plugins: PluginSet, *, resumed_from: int | None, report: Callable[[str], None]
    ) -> None:
        """Make each hook's instance and start its thread.

        Raises:
            ConfigError: An option of a hook is wrong.
            PluginError: A hook could not be made, or not in time.
        """
        self._info = RunInfo(
            run_id=job.run_id,
            name=job.recipe.run.name,
            directory=job.directory,
            recipe=unstructure(job.recipe),
            resumed_from=resumed_from,
        )
        names = job.recipe.tracking.hooks
        for name in names:
            options = job.recipe.tracking.options.get(name, {})
            make = functools.partial(plugins.create, "hook", name, options, self._info, f"tracking.options.{name}")
            plugins.attach(name, make_in_time(name, make, _MAKE_S))
        self._runner = HookRunner(plugins.manager, [f"hook:{name}:instance" for name in names], report)

    def notify(self, hook: str, **arguments: Any) -> None:
        """Queue a call of `hook`; `run` is added to its arguments."""
        self._runner.notify(hook, run=self._info, **arguments)

    def close(self, timeout_s: float) -> None:
        """Wait for what is queued, at most `timeout_s`."""
        self._runner.close(timeout_s)
