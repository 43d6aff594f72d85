"""One run's hook, called as a run calls it, with a note of how long each call takes."""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterable, Mapping
from typing import Any, Final, final

import pluggy

from cosmos_core.plugin.selection import PluginSet
from cosmos_core.protocols import RunInfo
from cosmos_core.run.hooks import HookRunner
from cosmos_core.testing.conformance.hook.story import Call
from cosmos_core.types import JSON

_POLL_S: Final = 0.005


@final
class HookSession:
    """Makes the hook for a run and tells it what happens.

    Attributes:
        problems: What the run would report of the hook, and the calls that took too long.
        instance: What the plugin made.
        manager: The run's plugin manager.
    """

    def __init__(self, plugin: str, options: Mapping[str, JSON], run: RunInfo, *, timeout_s: float) -> None:
        """Make the hook.

        Raises:
            PluginBrokenError: It implements a hook that does not exist, or with wrong arguments.
        """
        plugins = PluginSet.load([("hook", plugin)])
        self.instance: Final = plugins.create("hook", plugin, options, run)
        plugins.attach(plugin, self.instance)
        self.manager: Final = plugins.manager
        self.problems: Final[list[str]] = []
        self._run: Final = run
        self._timeout_s: Final = timeout_s
        self._told = self._answered = 0
        self._under_way: tuple[str, float] | None = None
        self._place = ""
        self.manager.add_hookcall_monitoring(self._before, self._after)
        self._runner: Final = HookRunner(self.manager, [f"hook:{plugin}:instance"], self._note)

    def tell(self, calls: Iterable[Call]) -> None:
        """Tell what happens, and wait until the hook has taken it in; stops at the first problem."""
        for call in calls:
            self._told += 1
            self._runner.notify(call.hook, run=self._run, **call.arguments)
        while self._answered < self._told and not self.problems:
            under_way = self._under_way
            if under_way is not None and time.monotonic() - under_way[1] > self._timeout_s:
                self.problems.append(
                    f"{under_way[0]} has not returned after {self._timeout_s:g} s; do slow work on a daemon thread and "
                    "wait for it, with a bound, in cosmos_run_ended"
                )
            time.sleep(_POLL_S)

    def close(self) -> None:
        """End as a run does."""
        self._runner.close(0.0 if self.problems else self._timeout_s)

    def _before(self, hook: str, *_: object) -> None:
        self._under_way = (hook, time.monotonic())

    def _after(self, outcome: pluggy.Result[Any], *_: object) -> None:
        if outcome.exception is not None:
            frame = traceback.extract_tb(outcome.exception.__traceback__)[-1]
            self._place = f" ({frame.filename}, line {frame.lineno})"
        self._under_way = None
        self._answered += 1

    def _note(self, problem: str) -> None:
        self.problems.append(f"{problem}{self._place}")
