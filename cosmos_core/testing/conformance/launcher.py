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
from cosmos_core.testing.conformance.plugin import PluginConformance, fault, fault_if

PROBE: Final = "cosmos_core.testing.conformance.launched"
NAME: Final = "rollout-0"

T = TypeVar("T")


_CODE = 7
_STOP_S = 15.0


_ODD_NAMES: Final = ("two words", "it's", "$(touch odd)", "`touch odd`", 'say "x"', "a;b", "line\nbreak")
_DATA: Final = (".yaml", ".yml", ".json")
"""Ends of the names of files that no shell reads."""


def _check_data(text: str, folder: str) -> None:
    """Refuse data, such as YAML, with the folder outside of quotes, or with a line break of it."""
    bare = [line for line in text.splitlines() if f" {folder}" in f" {line}" and _is_bare(line, folder)]
    if bare or ("\n" in folder and folder in text):
        fault(f"the run's folder {folder!r} is not quoted in the line {(bare or [folder])[0]!r}")


def _is_bare(line: str, folder: str) -> bool:
    before = line.partition(folder)[0]
    return before.count("'") % 2 == 0 and before.count('"') % 2 == 0


def _check_shell(plain: str, plain_folder: str, odd: str, odd_folder: str) -> None:
    """Refuse a script in which a shell reads other words for an odd folder than in the same script for a plain one."""
    # In double quotes, $ and ` mean what they mean outside: those are no quotes for a name that has one.
    kinds = ("'\"", "'") if set(odd_folder) & set("$`") else ("'\"",)
    for quotes in kinds:
        before = _words(plain, quotes)
        if before is None:
            continue
        after = _words(odd, quotes)
        wanted = [word.replace(plain_folder, odd_folder) for word in before if plain_folder in word]
        got = [word for word in after or () if odd_folder in word]
        if after is None or len(after) != len(before) or got != wanted:
            lines = [line for line in odd.splitlines() if odd_folder.split("\n", maxsplit=1)[0] in line]
            fault(f"the run's folder {odd_folder!r} is not quoted in the line {(lines or [''])[-1]!r}")


def _words(script: str, quotes: str) -> list[str] | None:
    """The words of a script, but its comments, where these characters quote; None if a quotation does not end."""
    lexer = shlex.shlex(script, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    lexer.quotes = quotes
    try:
        return list(lexer)
    except ValueError:
        return None


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
        """The end of a process, once the launcher tells."""
        found = self.wait(launcher.exits, f"exits() did not tell within {self.timeout_s:g} s that {name} had ended")
        if [end.name for end in found] != [name]:
            fault(f"exits() told of {[end.name for end in found]}, and only {name!r} had ended")
        return found[0]

    def wait(self, condition: Callable[[], T], otherwise: str) -> T:
        """Wait until `condition` is true and return it."""
        deadline = time.monotonic() + self.timeout_s
        while not (found := condition()):
            if time.monotonic() > deadline:
                fault(otherwise)
            time.sleep(0.02)
        return found

    def is_alive(self, folder: Path, name: str = NAME) -> bool:
        """True if a process that goes on still does."""
        path = folder / f"{name}.alive"
        before = path.read_text(encoding="utf-8") if path.exists() else ""
        time.sleep(0.5)
        return path.exists() and path.read_text(encoding="utf-8") != before

    def test_a_process_gets_its_words_and_its_end_is_told_once(
        self, launcher: Launcher, spec: Callable[..., ProcessSpec], tmp_path: Path
    ) -> None:
        """Words arrive as they are, whatever a shell would make of them, and the supervisor acts on each end once."""
        wanted = spec(f"exit:{_CODE}")
        got = self.start(launcher, wanted, tmp_path)
        end = self.ended(launcher)
        again, left = [each.name for each in launcher.exits()], list(launcher.running())
        (variable,) = wanted.environment.values()
        words = list(wanted.arguments[-3:])
        checks = {
            f"the process got the arguments {got['rest']}, and {words} were told": got["rest"] != words,
            f"the process got {got['variable']!r} in its environment, and {variable!r} was told": (
                got["variable"] != variable
            ),
            f"the process ended with code {_CODE}, and exits() told {end.code}": end.code != _CODE,
            f"the process's last words were {LAST_WORDS!r}, and exits() told {end.error!r}": (
                LAST_WORDS not in end.error
            ),
            f"exits() told again of {again}; tell each end once": again,
            f"running() has {left}, which have ended": left,
        }
        fault_if(message for message, is_wrong in checks.items() if is_wrong)

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

    @pytest.fixture
    def submission(self, make: Callable[..., Any], capabilities: LauncherCapabilities) -> Submission:
        """The submission that would be made."""
        if not capabilities.submits:
            pytest.skip("it starts processes where cosmos run is, and hands nothing over")
        rendered = make().render()
        if not isinstance(rendered, Submission):
            fault(f"render() returned {rendered!r}, which is no Submission")
        return rendered

    def test_it_says_from_where_it_starts_or_submits(
        self, make: Callable[..., Any], capabilities: LauncherCapabilities
    ) -> None:
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
        self,
        submission: Submission,
        make: Callable[..., Any],
        provider: Provider[Any],
        options: Any,
        context: LauncherContext,
    ) -> None:
        """It is what `--render-only` shows; names are people's words: what a shell makes of them must not happen."""
        if make().render() != submission:
            fault("render() gave another submission the second time; write what options and context say, alone")
        if context.directory.parent.exists():
            fault(f"render() wrote into {context.directory.parent}; the run's folder is made when it is submitted")
        if not submission.name or "/" in submission.name:
            fault(f"the submission's file is named {submission.name!r}; give a plain name, such as job.sh")
        given: Any = structure(options, provider.options, "launch.options")
        for name in _ODD_NAMES:
            odd = attrs.evolve(context, name=name, directory=context.directory.parent / name)
            try:
                text = provider.create(given, odd).render().text
            except ConfigError:
                continue
            if submission.name.endswith(_DATA):
                _check_data(text, str(odd.directory))
            else:
                _check_shell(submission.text, str(context.directory), text, str(odd.directory))
        if str(context.directory) not in submission.text:
            fault(f"the submission does not mention the run's folder {context.directory}")
