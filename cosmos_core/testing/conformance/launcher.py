"""The kit for launchers."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar, Final, TypeVar

import attrs
import pytest

from cosmos_core.config.structure import structure
from cosmos_core.errors import ConfigError, ReplicaError
from cosmos_core.protocols import (
    Exit,
    Kind,
    Launcher,
    LauncherCapabilities,
    LauncherContext,
    Pool,
    ProcessSpec,
    Provider,
)
from cosmos_core.protocols.launcher import ClusterLauncher, Submission
from cosmos_core.testing.conformance.launched import LAST_WORDS, VARIABLE
from cosmos_core.testing.conformance.plugin import Make, PluginConformance, fault, fault_if

T = TypeVar("T")

_PROBE: Final = "cosmos_core.testing.conformance.launched"
_NAME: Final = "rollout-0"
_CODE: Final = 7
_STOP_S: Final = 15.0
_ODD_NAMES: Final = ("two words", "it's", "$(touch odd)", "`touch odd`", 'say "x"', "a;b", "line\nbreak")
_DATA: Final = (".yaml", ".yml", ".json")
"""Ends of the names of files that no shell reads."""


@attrs.define
class Started:
    """A launcher with which a test starts processes, each doing a task of the probe."""

    launcher: Launcher
    folder: Path
    timeout_s: float

    def start(self, task: str, name: str = _NAME) -> tuple[ProcessSpec, Any]:
        """Start a process, and wait for what it says of itself."""
        spec = ProcessSpec(
            name=name,
            module=_PROBE,
            arguments=(str(self.folder), task, "--name", name, "a b", "", "$HOME;'\"*"),
            environment={VARIABLE: "two words; $HOME"},
        )
        path = self.folder / f"{name}.started"
        path.unlink(missing_ok=True)
        try:
            self.launcher.start(spec)
        except ReplicaError as error:
            fault(f"start() raised {error}")
        self._wait(path.exists, f"the process {name} did not begin within {self.timeout_s:g} s of start()")
        return spec, json.loads(path.read_text(encoding="utf-8"))

    def ended(self) -> Exit:
        """The end of the process, once the launcher tells."""
        late = f"exits() did not tell within {self.timeout_s:g} s that {_NAME} had ended"
        found = self._wait(self.launcher.exits, late)
        if [end.name for end in found] != [_NAME]:
            fault(f"exits() told of {[end.name for end in found]}, and only {_NAME!r} had ended")
        return found[0]

    def is_alive(self, name: str = _NAME) -> bool:
        """True if a process that goes on still does."""
        path = self.folder / f"{name}.alive"
        before = path.read_bytes() if path.exists() else b""
        time.sleep(0.5)
        return path.exists() and path.read_bytes() != before

    def _wait(self, condition: Callable[[], T], otherwise: str) -> T:
        deadline = time.monotonic() + self.timeout_s
        while not (found := condition()):
            if time.monotonic() > deadline:
                fault(otherwise)
            time.sleep(0.02)
        return found


class LauncherConformance(PluginConformance):
    """Tests that every launcher must pass: it starts what it is told, tells each end, and leaves nothing behind.

    Set `plugin`, and what else the defaults do not do for. Where `check()` says that no process can be started from
    here, tests that start some are skipped: run them in such a place too, by a test class whose fixtures make one.

    Attributes:
        timeout_s: Seconds within which a process begins, and its end is told.
        grace_s: Seconds that `stop` is given.

    Fixtures to override: `options`, the options to test with; `context`, the run, for which processes are started in
    `tmp_path`.
    """

    kind: ClassVar[Kind] = "launcher"
    timeout_s: ClassVar[float] = 20.0
    grace_s: ClassVar[float] = 1.0

    @pytest.fixture
    def context(self, tmp_path: Path) -> LauncherContext:
        """A run with replicas of both roles, whose folder does not exist yet."""
        return LauncherContext(
            name="conformance",
            directory=tmp_path / "runs" / "conformance",
            pools=tuple(
                attrs.evolve(pool, device_bytes=1 << 30, host_bytes=1 << 30, uncounted=("activations",))
                for pool in (Pool(role="policy", replicas=1), Pool(role="rollout", replicas=2))
            ),
            recipe='[run]\nname = "conformance"\nsteps = 1\n',
        )

    @pytest.fixture
    def started(self, make: Make, tmp_path: Path) -> Iterator[Started]:
        """One in a place where it can start processes; whatever a test does, they are ended."""
        made: Launcher = make()
        try:
            made.check()
        except ConfigError as error:
            pytest.skip(f"no process can be started from here: {error}")
        yield Started(made, tmp_path, self.timeout_s)
        made.stop(0.0)

    def test_a_process_gets_its_words_and_its_end_is_told_once(self, started: Started) -> None:
        """Words arrive as they are, whatever a shell would make of them, and the supervisor acts on each end once."""
        spec, got = started.start(f"exit:{_CODE}")
        end = started.ended()
        again, left = [each.name for each in started.launcher.exits()], list(started.launcher.running())
        words, variable = list(spec.arguments[-3:]), spec.environment[VARIABLE]
        last_words = LAST_WORDS if LAST_WORDS in end.error else end.error
        checks: tuple[tuple[str, Any, Any], ...] = (
            ("the process got the arguments", got["rest"], words),
            ("the process got in its environment", got["variable"], variable),
            (f"of a process that ended with code {_CODE}, exits() told", end.code, _CODE),
            ("of the process's last words, exits() told", last_words, LAST_WORDS),
            ("exits() tells each end once, and told again of", again, []),
            ("after they had ended, running() has", left, []),
        )
        fault_if(f"{what} {seen!r}; it should be {wanted!r}" for what, seen, wanted in checks if seen != wanted)

    def test_what_runs_is_listed_and_a_killed_one_is_told(self, started: Started) -> None:
        """A process that hangs is killed by name, and its replacement has the same one."""
        launcher = started.launcher
        started.start("stubborn")
        if list(launcher.running()) != [_NAME]:
            fault(f"running() is {list(launcher.running())} while {_NAME} runs")
        if told := launcher.exits():
            fault(f"exits() told of {[each.name for each in told]}, which have not ended")
        launcher.kill(_NAME)
        if started.ended().code == 0:
            fault("a process that was killed was told to have ended with code 0")
        if started.is_alive():
            fault("kill() left the process alive")
        launcher.kill(_NAME)
        started.start(f"exit:{_CODE}")
        if started.ended().code != _CODE:
            fault(f"the second process of the name {_NAME} ended with code {_CODE}, and exits() told another")

    def test_stop_leaves_nothing_behind(self, started: Started) -> None:
        """Whatever a run was doing, it ends, and with it all that it holds."""
        names = ("policy-0", _NAME)
        for name in names:
            started.start("stubborn", name)
        took_s = _stop(started.launcher, self.grace_s)
        if took_s > self.grace_s + _STOP_S:
            fault(f"stop({self.grace_s:g}) took {took_s:.0f} s")
        if alive := [name for name in names if started.is_alive(name)]:
            fault(f"stop() left {', '.join(alive)} alive")
        if left := started.launcher.running():
            fault(f"running() has {list(left)} after stop()")

    def test_a_process_may_end_by_itself_when_it_is_asked_to(self, started: Started) -> None:
        """A replica says goodbye before it ends; who is killed at once is taken for lost."""
        started.start("willing")
        took_s = _stop(started.launcher, started.timeout_s)
        if not (started.folder / f"{_NAME}.asked").exists():
            fault("stop() killed a process without asking it to end first (SIGTERM)")
        if took_s >= started.timeout_s:
            fault("stop() waited for the whole grace although the process had ended")

    def test_it_says_from_where_it_starts_or_submits(self, make: Make, capabilities: LauncherCapabilities) -> None:
        """No run begins that could not start; `cosmos launch` takes those that submit, `cosmos run` the others."""
        try:
            make().check()
        except ConfigError as error:
            if not str(error).strip():
                fault("check() refused without a word; say from where processes can be started")
        except Exception as error:  # noqa: BLE001 - the plugin's, which is what is tested
            fault(f"check() raised {type(error).__name__}: {error}; refuse with a ConfigError")
        if capabilities.submits != isinstance(make(), ClusterLauncher):
            has = "lacks" if capabilities.submits else "has"
            fault(f"it declares submits={capabilities.submits} and {has} render(), ready() and submit()")

    def test_a_submission_is_repeatable_and_finds_the_run(
        self, make: Make, provider: Provider[Any], options: Any, context: LauncherContext
    ) -> None:
        """It is what `--render-only` shows; names are people's words: what a shell makes of them must not happen."""
        if not provider.capabilities.submits:
            pytest.skip("it starts processes where cosmos run is, and hands nothing over")
        submission = make().render()
        if not isinstance(submission, Submission):
            fault(f"render() returned {submission!r}, which is no Submission")
        if make().render() != submission:
            fault("render() gave another submission the second time; write what options and context say, alone")
        if context.directory.parent.exists():
            fault(f"render() wrote into {context.directory.parent}; the run's folder is made when it is submitted")
        if not submission.name or "/" in submission.name:
            fault(f"the submission's file is named {submission.name!r}; give a plain name, such as job.sh")
        given: Any = structure(options, provider.options, "launch.options")
        folder = str(context.directory)
        for name in _ODD_NAMES:
            odd = attrs.evolve(context, name=name, directory=context.directory.parent / name)
            try:
                text = provider.create(given, odd).render().text
            except ConfigError:
                continue
            line = _unquoted(submission, folder, text, str(odd.directory))
            if line is not None:
                fault(f"the run's folder {str(odd.directory)!r} is not quoted in the line {line!r}")
        if folder not in submission.text:
            fault(f"the submission does not mention the run's folder {folder}")

    def test_a_submission_brings_the_variables_that_it_says(
        self, make: Make, capabilities: LauncherCapabilities
    ) -> None:
        """People are told of others that the run needs."""
        if not capabilities.submits:
            pytest.skip("it hands nothing over")
        submission = make().render()
        if unnamed := sorted(each for each in submission.variables or () if each not in submission.text):
            fault(f"the submission says that it gives {', '.join(unnamed)}, which its text does not name")


def _stop(launcher: Launcher, grace_s: float) -> float:
    began = time.monotonic()
    launcher.stop(grace_s)
    return time.monotonic() - began


def _unquoted(plain: Submission, plain_folder: str, odd: str, folder: str) -> str | None:
    """The line that has an odd folder outside of quotes, of data such as YAML or of a shell's script."""
    if plain.name.endswith(_DATA):
        # A line break is no text of data, in quotes or not.
        if "\n" in folder and folder in odd:
            return folder
        for line in odd.splitlines():
            left, found, _ = line.partition(folder)
            is_bare = left.count("'") % 2 == 0 and left.count('"') % 2 == 0
            if found and is_bare and f" {folder}" in f" {line}":
                return line
        return None
    # A shell reads other words than in the same script for a plain folder. In double quotes, $ and ` mean what they
    # mean outside: those are no quotes for a name that has one.
    for quotes in ("'\"", "'") if set(folder) & set("$`") else ("'\"",):
        before, after = _words(plain.text, quotes), _words(odd, quotes)
        if before is None:
            continue
        wanted = [word.replace(plain_folder, folder) for word in before if plain_folder in word]
        if after is None or len(after) != len(before) or [word for word in after if folder in word] != wanted:
            first = folder.splitlines()[0]
            return next((line for line in reversed(odd.splitlines()) if first in line), "")
    return None


def _words(script: str, quotes: str) -> list[str] | None:
    """The words of a script, but its comments, where these characters quote; None if a quotation does not end."""
    lexer = shlex.shlex(script, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    lexer.quotes = quotes
    try:
        return list(lexer)
    except ValueError:
        return None
