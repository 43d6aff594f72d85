"""The launcher under test, and processes that it starts."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar, Final, TypeVar

import pytest

from cosmos_core.errors import ConfigError, ReplicaError
from cosmos_core.protocols import Exit, Kind, Launcher, LauncherContext, Pool, ProcessSpec
from cosmos_core.testing.conformance.launcher.probe import VARIABLE
from cosmos_core.testing.conformance.plugin import PluginConformance, fault

PROBE: Final = "cosmos_core.testing.conformance.launcher.probe"
NAME: Final = "rollout-0"

T = TypeVar("T")


class LauncherSubject(PluginConformance):
    """What the tests of launchers share; `LauncherConformance` describes what to override."""

    kind: ClassVar[Kind] = "launcher"
    timeout_s: ClassVar[float] = 20.0
    grace_s: ClassVar[float] = 1.0

    @pytest.fixture
    def context(self, tmp_path: Path) -> LauncherContext:
        """A run with replicas of both roles, whose folder does not exist yet."""
        return LauncherContext(
            name="conformance",
            directory=tmp_path / "runs" / "conformance",
            pools=(Pool(role="policy", replicas=1), Pool(role="rollout", replicas=2)),
            recipe='[run]\nname = "conformance"\nsteps = 1\n',
        )

    @pytest.fixture
    def launcher(self, make: Callable[..., Any]) -> Iterator[Launcher]:
        """One in a place where it can start processes; whatever a test does, they are ended."""
        made: Launcher = make()
        try:
            made.check()
        except ConfigError as error:
            pytest.skip(f"no process can be started from here: {error}")
        yield made
        made.stop(0.0)

    @pytest.fixture
    def spec(self, tmp_path: Path) -> Callable[..., ProcessSpec]:
        """`spec(task)`: a process that does a task of the probe; `name` gives it another one."""

        def make(task: str, name: str = NAME) -> ProcessSpec:
            return ProcessSpec(
                name=name,
                module=PROBE,
                arguments=(str(tmp_path), task, "--name", name, "a b", "", "$HOME;'\"*"),
                environment={VARIABLE: "two words; $HOME"},
            )

        return make

    def start(self, launcher: Launcher, spec: ProcessSpec, folder: Path) -> Any:
        """Start a process, and wait for what it says of itself."""
        path = folder / f"{spec.name}.started"
        path.unlink(missing_ok=True)
        try:
            launcher.start(spec)
        except ReplicaError as error:
            fault(f"start() raised {error}")
        self.wait(path.exists, f"the process {spec.name} did not begin within {self.timeout_s:g} s of start()")
        return json.loads(path.read_text(encoding="utf-8"))

    def ended(self, launcher: Launcher, name: str = NAME) -> Exit:
        """How a process ended, once the launcher tells."""
        found = self.wait(launcher.exits, f"exits() did not tell within {self.timeout_s:g} s that {name} had ended")
        if [end.name for end in found] != [name]:
            fault(f"exits() told of {[end.name for end in found]}, and only {name!r} had ended")
        return found[0]

    def wait(self, condition: Callable[[], T], otherwise: str) -> T:
        """What `condition` returns, once it is true."""
        deadline = time.monotonic() + self.timeout_s
        while not (found := condition()):
            if time.monotonic() > deadline:
                fault(otherwise)
            time.sleep(0.02)
        return found

    def is_alive(self, folder: Path, name: str = NAME) -> bool:
        """Whether a process that goes on still does."""
        path = folder / f"{name}.alive"
        before = path.read_text(encoding="utf-8") if path.exists() else ""
        time.sleep(0.5)
        return path.exists() and path.read_text(encoding="utf-8") != before
