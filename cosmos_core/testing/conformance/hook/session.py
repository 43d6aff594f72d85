"""One run's hook, called as a run calls it, with a note of how long each call takes."""

from __future__ import annotations

import functools
import time
import traceback
from collections.abc import Iterable, Mapping
from typing import Any, Final, final

import pluggy

from cosmos_core.plugins.selection import PluginSet
from cosmos_core.protocols import RunInfo
from cosmos_core.run.hooks import HookRunner, make_in_time
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
            PluginBrokenError: It is not made in time, or implements a hook that does not exist or with wrong arguments.
        """
        plugins = PluginSet.load([("hook", plugin)])
        make = functools.partial(plugins.create, "hook", plugin, options, run)
        self.instance: Final = make_in_time(plugin, make, timeout_s)
        plugins.attach(plugin, self.instance)
        self.manager: Final = plugins.manager
        self.problems: Final[list[str]] = []
        self._run: Final = run
        self._timeout_s: Final = timeout_s
        self._told = self._answered = 0
        self._under_way = ""
        self._place = ""
        self.manager.add_hookcall_monitoring(self._before, self._after)
        self._runner: Final = HookRunner(self.manager, [f"hook:{plugin}:instance"], self._note)

    def tell(self, calls: Iterable[Call]) -> None:
        """Tell what happens, and wait until the hook has taken it in; stops at the first problem."""
        for call in calls:
            self._told += 1
            self._runner.notify(call.hook, run=self._run, **call.arguments)
        answered, since = self._answered, time.monotonic()
        while self._answered < self._told and not self.problems:
            if answered != self._answered:
                answered, since = self._answered, time.monotonic()
            elif time.monotonic() - since > self._timeout_s:
                self.problems.append(self._stalled())
            time.sleep(_POLL_S)

    def close(self) -> None:
        """End as a run does."""
        self._runner.close(0.0 if self.problems else self._timeout_s)

    def _stalled(self) -> str:
        if not self._under_way:
            return f"it took in {self._answered} of {self._told} calls and no more; never end the thread that calls it"
        return (
            f"{self._under_way} has not returned after {self._timeout_s:g} s; do slow work on a daemon thread and "
            "wait for it, with a bound, in cosmos_run_ended"
        )

    def _before(self, hook: str, *_: object) -> None:
        self._under_way = hook

    def _after(self, outcome: pluggy.Result[Any], *_: object) -> None:
        if outcome.exception is not None:
            frame = traceback.extract_tb(outcome.exception.__traceback__)[-1]
            self._place = f" ({frame.filename}, line {frame.lineno})"
        self._under_way = ""
        self._answered += 1

    def _note(self, problem: str) -> None:
        self.problems.append(f"{problem}{self._place}")
