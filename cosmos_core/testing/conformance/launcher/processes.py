"""Tests of the processes that a launcher starts, watches and ends."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from cosmos_core.protocols import Launcher, ProcessSpec
from cosmos_core.testing.conformance.launcher.probe import LAST_WORDS
from cosmos_core.testing.conformance.launcher.subject import NAME, LauncherSubject
from cosmos_core.testing.conformance.plugin import fault

_CODE = 7
_STOP_S = 15.0


class LauncherProcesses(LauncherSubject):
    """Start, watch, end."""

    def test_a_process_gets_its_command_line_and_environment(
        self, launcher: Launcher, spec: Callable[..., ProcessSpec], tmp_path: Path
    ) -> None:
        """Arguments and variables arrive as they are, whatever a shell would make of them."""
        wanted = spec("exit:0")
        got = self.start(launcher, wanted, tmp_path)
        if got["rest"] != list(wanted.arguments[-3:]):
            fault(f"the process got the arguments {got['rest']}, and {list(wanted.arguments[-3:])} were told")
        (variable,) = wanted.environment.values()
        if got["variable"] != variable:
            fault(f"the process got {got['variable']!r} in its environment, and {variable!r} was told")

    def test_an_end_is_told_once_with_its_code(
        self, launcher: Launcher, spec: Callable[..., ProcessSpec], tmp_path: Path
    ) -> None:
        """The supervisor acts on each end once: it restarts what was lost, and ends the run with what failed."""
        self.start(launcher, spec(f"exit:{_CODE}"), tmp_path)
        end = self.ended(launcher)
        if end.code != _CODE:
            fault(f"the process ended with code {_CODE}, and exits() told {end.code}")
        if LAST_WORDS not in end.error:
            fault(f"the process's last words were {LAST_WORDS!r}, and exits() told {end.error!r}")
        if again := launcher.exits():
            fault(f"exits() told again of {[each.name for each in again]}; tell each end once")
        if left := launcher.running():
            fault(f"running() has {list(left)}, which have ended")

    def test_what_runs_is_listed_and_a_killed_one_is_told(
        self, launcher: Launcher, spec: Callable[..., ProcessSpec], tmp_path: Path
    ) -> None:
        """A process that hangs is killed by name, and its replacement has the same one."""
        self.start(launcher, spec("stubborn"), tmp_path)
        if list(launcher.running()) != [NAME]:
            fault(f"running() is {list(launcher.running())} while {NAME} runs")
        if told := launcher.exits():
            fault(f"exits() told of {[each.name for each in told]}, which have not ended")
        launcher.kill(NAME)
        if self.ended(launcher).code == 0:
            fault("a process that was killed was told to have ended with code 0")
        if self.is_alive(tmp_path):
            fault("kill() left the process alive")
        launcher.kill(NAME)
        self.start(launcher, spec(f"exit:{_CODE}"), tmp_path)
        if self.ended(launcher).code != _CODE:
            fault(f"the second process of the name {NAME} ended with code {_CODE}, and exits() told another")

    def test_stop_leaves_nothing_behind(
        self, launcher: Launcher, spec: Callable[..., ProcessSpec], tmp_path: Path
    ) -> None:
        """Whatever a run was doing, it ends, and with it all that it holds."""
        names = ("policy-0", NAME)
        for name in names:
            self.start(launcher, spec("stubborn", name), tmp_path)
        began = time.monotonic()
        launcher.stop(self.grace_s)
        if time.monotonic() - began > self.grace_s + _STOP_S:
            fault(f"stop({self.grace_s:g}) took {time.monotonic() - began:.0f} s")
        if alive := [name for name in names if self.is_alive(tmp_path, name)]:
            fault(f"stop() left {', '.join(alive)} alive")
        if left := launcher.running():
            fault(f"running() has {list(left)} after stop()")

    def test_a_process_may_end_by_itself_when_it_is_asked_to(
        self, launcher: Launcher, spec: Callable[..., ProcessSpec], tmp_path: Path
    ) -> None:
        """A replica says goodbye before it ends; who is killed at once is taken for lost."""
        self.start(launcher, spec("willing"), tmp_path)
        began = time.monotonic()
        launcher.stop(self.timeout_s)
        if not (tmp_path / f"{NAME}.asked").exists():
            fault("stop() killed a process without asking it to end first (SIGTERM)")
        if time.monotonic() - began >= self.timeout_s:
            fault("stop() waited for the whole grace although the process had ended")
