"""The lifecycle hooks that a recipe names, made and attached to a run's plugin manager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cosmos_core.config.job import Job
from cosmos_core.config.structure import unstructure
from cosmos_core.plugin.selection import PluginSet
from cosmos_core.protocols import RunInfo
from cosmos_core.run.hooks import HookRunner


class RunHooks:
    """Calls the hooks of a run, each with the run's `RunInfo`."""

    def __init__(
        self, job: Job, plugins: PluginSet, *, resumed_from: int | None, report: Callable[[str], None]
    ) -> None:
        """Make each hook's instance and start its thread.

        Raises:
            ConfigError: An option of a hook is wrong.
            PluginError: A hook could not be made.
        """
        self._info = RunInfo(
            run_id=job.run_id,
            name=job.recipe.run.name,
            directory=job.directory,
            recipe=unstructure(job.recipe),
            resumed_from=resumed_from,
        )
        lanes = []
        for name in job.recipe.tracking.hooks:
            options = job.recipe.tracking.options.get(name, {})
            plugins.attach(name, plugins.create("hook", name, options, self._info, f"tracking.options.{name}"))
            lanes.append(f"hook:{name}:instance")
        self._runner = HookRunner(plugins.manager, lanes, report)

    def notify(self, hook: str, **arguments: Any) -> None:
        """Queue a call of `hook`; `run` is added to its arguments."""
        self._runner.notify(hook, run=self._info, **arguments)

    def close(self, timeout_s: float) -> None:
        """Wait for what is queued, at most `timeout_s`."""
        self._runner.close(timeout_s)
