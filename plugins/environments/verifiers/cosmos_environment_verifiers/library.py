"""The verifiers library: environments and tasks as a recipe names them. It is imported when one is made."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import threading
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import Any, Final

from cosmos_core.errors import ConfigError, DataError
from cosmos_core.types import JSON


def environment(given: Mapping[str, Any], path: str) -> Any:
    """The configuration of an environment, by its table at a key path; its agents run here, with our harness if none.

    Raises:
        ConfigError: The library is absent, there is no such environment or taskset, or it refuses its options.
    """
    with _refusals(given, path):
        from verifiers.v1.configs.agent import agent_config_fields  # noqa: PLC0415 - seconds of imports
        from verifiers.v1.utils import loaders  # noqa: PLC0415

        taskset = dict(given.get("taskset", {}))
        config, whole = loaders.resolve_env_config({"id": given.get("id", ""), "taskset": taskset}), dict(given)
        has_harness = loaders.default_harness_id(taskset.get("id", "")) != "bash"
        for name, default in agent_config_fields(config).items():
            whole[name] = {"runtime": {"type": "subprocess"}, **whole.get(name, {})}  # verifiers' own is a service
            if default.harness is None and not has_harness:
                whole[name].setdefault("harness", {"id": __package__})
        config = loaders.resolve_env_config(whole)
        loaders.load_environment(config)
        return config


class Tasks:
    """The tasks of a taskset in their order, each loaded once in a process."""

    def __init__(self, taskset: Any) -> None:
        self.taskset: Final = taskset
        self._rest, self._known = iter(taskset), list[Any]()
        self._lock: Final = threading.Lock()

    def first(self, number: int | None) -> list[Any]:
        """The first tasks, as many as there are; all if `number` is None. DataError: one cannot be loaded."""
        with self._lock:
            more = None if number is None else max(number - len(self._known), 0)
            try:
                self._known.extend(itertools.islice(self._rest, more))
            except Exception as error:
                where = f"verifiers: task {len(self._known)} cannot be loaded"
                self._rest, self._known = iter(self.taskset), []  # an iterator that has raised would seem to end
                raise DataError(f"{where}: {type(error).__name__}: {error}") from error
            return self._known[:number]

    def of(self, metadata: Mapping[str, JSON]) -> Any:
        """The task that a row names by its number, `task`, and may prove by its `key`; DataError if there is none."""
        number: Any = metadata.get("task")
        if isinstance(number, bool) or not isinstance(number, int) or number < 0:
            raise DataError(
                f"the row's metadata has the task {number!r:.80}, which is no number of a task of the taskset; the "
                "dataset `verifiers-tasks` has rows that name tasks"
            )
        if number >= (size := len(found := self.first(number + 1))):
            raise DataError(f"the row names task {number} of a taskset that has {size}")
        if metadata.get("key", found[number].key) != found[number].key:
            raise DataError(
                f"task {number} is another than that of the row: give dataset and environment the same taskset; one "
                "that draws its tasks has to draw the same ones in each process"
            )
        return found[number]


def tasks(taskset: Mapping[str, JSON], path: str) -> Tasks:
    """The tasks of a taskset, by its table at a key path; ConfigError if it cannot be made."""
    with _refusals(taskset, path):
        return _tasks(json.dumps(taskset, sort_keys=True))


@functools.cache
def _tasks(table: str) -> Tasks:
    from verifiers.v1.utils import loaders  # noqa: PLC0415

    given = json.loads(table)
    return Tasks(loaders.load_taskset(loaders.taskset_config_type(given.get("id", "")).model_validate(given)))


@contextlib.contextmanager
def _refusals(given: Mapping[str, Any], path: str) -> Iterator[None]:
    if find_spec("verifiers") is None:
        raise ConfigError(
            f"{path}: verifiers is not installed; run: pip install 'cosmos-environment-verifiers[library]'"
        )
    try:
        yield
    except Exception as error:  # modules are anybody's, and refuse in their own ways
        said = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{path}: verifiers cannot make {dict(given)!r:.200}: {said}") from error
