"""Calls the lifecycle hooks of a recipe, each on a thread of its own that can neither block nor break the run."""

from __future__ import annotations

import functools
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from typing import Any, Final, TypeVar

import pluggy

from cosmos_core.config.job import Job
from cosmos_core.config.structure import unstructure
from cosmos_core.errors import PluginBrokenError
from cosmos_core.plugins.selection import PluginSet
from cosmos_core.protocols import RunInfo
from cosmos_core.threads import begin

_QUEUE_SIZE: Final = 4096
_LOG: Final = logging.getLogger(__name__)


class HookRunner:
    """Calls the hooks of each registered plugin in the order things happened.

    A hook that raises, be it SystemExit, is switched off; one that falls behind by a full queue, or does not finish
    in time at the end, is abandoned. Either is reported once and the run goes on.
    """

    def __init__(
        self,
        manager: pluggy.PluginManager,
        names: Sequence[str],
        report: Callable[[str], None],
        *,
        queue_size: int = _QUEUE_SIZE,
    ) -> None:
        """Start a thread for each of `names`, under which the hooks' objects are registered with `manager`."""
        self._queues: Final = [_HookQueue(manager, name, report, queue_size) for name in names]

    def notify(self, hook: str, **arguments: Any) -> None:
        """Queue a call of `hook` for every plugin that is still on; returns at once."""
        for each in self._queues:
            each.put(hook, arguments)

    def close(self, timeout_s: float) -> list[str]:
        """Wait for the calls that are queued, at most `timeout_s` in all, and abandon the rest.

        Returns:
            Texts that plugins which are still on have returned from their last call.
        """
        deadline = time.monotonic() + timeout_s
        for each in self._queues:
            each.put_end()
        for each in self._queues:
            each.join(deadline)
        return [text for each in self._queues for text in each.returned]


class _HookQueue:
    """One plugin's queue and thread."""

    def __init__(
        self, manager: pluggy.PluginManager, name: str, report: Callable[[str], None], queue_size: int
    ) -> None:
        self._name: Final = name.removeprefix("hook:").removesuffix(":instance")
        self._manager: Final = manager
        self._others: Final = [plugin for plugin in manager.get_plugins() if plugin is not manager.get_plugin(name)]
        self._report: Final = report
        # One place is kept free for the end mark, so that closing never waits.
        self._queue: Final[queue.Queue[tuple[str, dict[str, Any]] | None]] = queue.Queue(queue_size + 1)
        self._size: Final = queue_size
        self._is_off = False
        self._returned: list[Any] = []
        self._thread: Final = threading.Thread(target=self._serve, name=f"hook:{self._name}", daemon=True)
        self._thread.start()

    @property
    def returned(self) -> list[str]:
        """Texts that `cosmos_run_ended` returned; none of a plugin that is off."""
        return [] if self._is_off else [each for each in self._returned if isinstance(each, str)]

    def put(self, hook: str, arguments: dict[str, Any]) -> None:
        if self._is_off:
            return
        if self._queue.qsize() >= self._size:
            self._switch_off(f"fell behind by {self._size} calls")
            return
        self._queue.put_nowait((hook, arguments))

    def put_end(self) -> None:
        if not self._is_off:
            self._queue.put_nowait(None)

    def join(self, deadline: float) -> None:
        if self._is_off:
            return
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._switch_off(f"did not finish in time (at least {self._queue.qsize()} calls left)")

    def _serve(self) -> None:
        while (call := self._queue.get()) is not None and not self._is_off:
            hook, arguments = call
            try:
                returned = self._manager.subset_hook_caller(hook, self._others)(**arguments)
                self._returned = returned if hook == "cosmos_run_ended" else []
            except BaseException as error:  # noqa: BLE001 - SystemExit would end this thread without a word
                _LOG.info("hook %s raised in %s", self._name, hook, exc_info=True)
                said = str(error).strip().partition("\n")[0]
                self._switch_off(f"raised {type(error).__name__} in {hook}: {said}")

    def _switch_off(self, why: str) -> None:
        if not self._is_off:
            self._is_off = True
            self._report(f"hook {self._name!r} {why}; it is switched off, the run goes on")


T = TypeVar("T")

_MAKE_S: Final = 60.0


def make_in_time(name: str, make: Callable[[], T], timeout_s: float) -> T:
    """Make the hook `name`, or refuse it: a hook that blocks when it is made must not hold up the run's start."""
    made = begin(make, f"hook:{name}:make")
    wait([made], timeout_s)
    if made.done():
        error = made.exception()
        if error is None or isinstance(error, Exception):
            return made.result()
        # SystemExit would end the run without a word.
        raise PluginBrokenError(f"hook {name!r} could not be made: {type(error).__name__}: {error}") from error
    raise PluginBrokenError(
        f"hook {name!r} was not made within {timeout_s:g} s; do slow work in cosmos_run_started, which is called "
        "beside the run, not in Provider.create"
    )


class RunHooks(HookRunner):
    """Calls the hooks of a run, each with the run's `RunInfo`."""

    def __init__(
        self, job: Job, plugins: PluginSet, *, resumed_from: int | None, report: Callable[[str], None]
    ) -> None:
        """Make each hook's instance and start its thread."""
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
        super().__init__(plugins.manager, [f"hook:{name}:instance" for name in names], report)

    def notify(self, hook: str, **arguments: Any) -> None:
        """Queue a call of `hook`; `run` is added to its arguments."""
        super().notify(hook, run=self._info, **arguments)
