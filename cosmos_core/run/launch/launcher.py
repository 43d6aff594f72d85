"""The seam between supervision and the place where processes run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import attrs


@attrs.frozen(kw_only=True)
class ProcessSpec:
    """One process of a run.

    Attributes:
        name: Its name in logs and tables: `controller`, `policy-0`, `rollout-1`.
        module: The Python module to start it by.
        arguments: Its command line, after the module.
        environment: What to set besides the supervisor's own environment.
    """

    name: str
    module: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str] = attrs.field(factory=dict)


@attrs.frozen(kw_only=True)
class Exit:
    """A process that ended by itself; `code` is negative for a signal, `error` its last words (may be empty)."""

    name: str
    code: int
    error: str


class Launcher(Protocol):
    """Starts, watches and stops processes by name."""

    def start(self, spec: ProcessSpec) -> None:
        """Start a process; its output is kept with the run's logs.

        Raises:
            ReplicaError: It could not be started.
        """
        ...

    def running(self) -> Sequence[str]:
        """Names of the processes that have not ended."""
        ...

    def exits(self) -> list[Exit]:
        """Processes that ended since the last call."""
        ...

    def signal_stop(self) -> None:
        """Ask every process to end; returns at once."""
        ...

    def stop(self, grace_s: float) -> None:
        """Ask every process to end, and kill what has not ended after `grace_s`; nothing is left behind."""
        ...
