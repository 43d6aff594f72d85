"""The kit for hooks."""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, Final, TypeAlias

import attrs
import msgspec
import pytest

from cosmos_core.errors import PluginBrokenError
from cosmos_core.plugins.selection import PluginSet
from cosmos_core.protocols import KINDS, Kind, Provider, RunInfo
from cosmos_core.run.hooks import make_in_time
from cosmos_core.testing.conformance import story
from cosmos_core.testing.conformance.plugin import PluginConformance, fault
from cosmos_core.testing.conformance.story import HookSession, Surroundings
from cosmos_core.types import JSON

Open: TypeAlias = Callable[[RunInfo], HookSession]

_START_S: Final = 60.0


class HookConformance(PluginConformance):
    """Tests that every hook must pass: inherit it and set `plugin`.

    The hook is told of runs exactly as `cosmos run` tells it: on a thread beside the run, in the order in which
    things happen. Override what does not fit:

    Attributes:
        timeout_s: Longest time that making the hook or one call may take, and that a process may take to end once
            its run is over.
        own_variables: Prefixes of environment variables that a library of the hook keeps for itself (`("WANDB_",)`).

    Fixtures to override: `options`; `context`, the `RunInfo` of the run that is followed (its folder is empty).
    """

    kind: ClassVar[Kind] = "hook"
    timeout_s: ClassVar[float] = 10.0
    own_variables: ClassVar[Sequence[str]] = ()

    @pytest.fixture
    def context(self, tmp_path: Path) -> RunInfo:
        """A run with a complete recipe, in a folder of its own."""
        return story.run_info(_folder(tmp_path, "a run"), "a-run")

    @pytest.fixture(autouse=True)
    def restored(self) -> Iterator[None]:
        """Nothing that a hook changes in the process reaches another test."""
        before = Surroundings.look()
        yield
        before.restore()

    @pytest.fixture
    def provider(self, plugins: PluginSet) -> Provider[Any]:
        """The provider that the plugin's hook returned, which must make the hook in time."""
        provider = plugins.provider(self.kind, self.plugin)
        return attrs.evolve(provider, create=self._in_time(provider.create))

    @pytest.fixture
    def make(self, plugins: PluginSet, options: Mapping[str, JSON], context: RunInfo) -> Callable[..., Any]:
        """Make a hook in time."""

        def create(**changes: JSON) -> Any:
            return plugins.create(self.kind, self.plugin, {**options, **changes}, context)

        return self._in_time(create)

    @pytest.fixture
    def open_run(self, options: Mapping[str, JSON]) -> Open:
        """Make the hook for a run."""

        def begin(run: RunInfo) -> HookSession:
            try:
                return HookSession(self.plugin, options, run, timeout_s=self.timeout_s)
            except PluginBrokenError as error:
                return fault(str(error))

        return begin

    def test_it_implements_lifecycle_hooks(self, open_run: Open, context: RunInfo) -> None:
        """A hook that is misspelt, unmarked or in the wrong place would never be called."""
        session = open_run(context)
        callers = session.manager.get_hookcallers(session.instance) or []
        marked = {caller.name for caller in callers}
        unmarked = sorted(name for name in dir(session.instance) if name.startswith("cosmos_") and name not in marked)
        if unmarked:
            fault(f"{', '.join(unmarked)} of {type(session.instance).__name__} lacks @hookimpl: it is never called")
        module = session.manager.get_plugin(f"hook:{self.plugin}")
        provided = {caller.name for caller in session.manager.get_hookcallers(module) or []}
        stray = sorted(provided - {f"cosmos_{kind}" for kind in KINDS})
        if stray:
            fault(
                f"{', '.join(stray)} is implemented by the plugin's module, where a run never calls it; make it a "
                "method of the object that Provider.create returns"
            )
        if not marked:
            fault(
                f"{type(session.instance).__name__} implements no lifecycle hook, so it is never told anything; mark "
                "methods such as cosmos_step_finished with @hookimpl on the object that Provider.create returns"
            )
        session.close()

    def test_a_whole_run_is_followed(self, open_run: Open, context: RunInfo) -> None:
        """It never breaks or blocks a run."""
        calls = chain(story.beginning(), story.steps(1, 3), story.ending("finished"))
        _follow(open_run(context), calls, "an ordinary run")

    def test_a_resumed_run_is_followed(self, open_run: Open, context: RunInfo) -> None:
        """It finds what it left behind in the first session, and steps that are told again."""
        _follow(open_run(context), chain(story.beginning(), story.steps(1, 3), story.ending("stopped")), "a run")
        resumed = attrs.evolve(context, resumed_from=2)
        _follow(
            open_run(resumed), chain(story.beginning(), story.steps(3, 5), story.ending("finished")), "its resumption"
        )

    def test_a_run_that_fails_at_once_is_followed(self, open_run: Open, context: RunInfo) -> None:
        """Nothing may be taken for granted at the end: no step, no evaluation."""
        begun = story.Call(hook="cosmos_run_started")
        _follow(open_run(context), chain([begun], story.ending("failed", accuracy=None)), "a run that fails at once")

    def test_odd_numbers_and_names_are_taken(self, open_run: Open, context: RunInfo) -> None:
        """Metrics may be empty, not finite, or named in any language."""
        calls = chain(story.beginning(), story.steps(1, 3), story.oddities(), story.ending("finished"))
        _follow(open_run(context), calls, "a run with odd metrics (empty, nan, inf, unicode)")

    def test_arguments_stay_as_they_are(self, open_run: Open, context: RunInfo) -> None:
        """Other hooks are told with the same objects."""
        calls = [*story.beginning(), *story.steps(1, 3), *story.ending("finished")]
        before = copy.deepcopy((context.recipe, calls))
        _follow(open_run(context), calls, "an ordinary run")
        if context.recipe != before[0]:
            fault("the hook changed run.recipe; work on a copy")
        for call, kept in zip(calls, before[1], strict=True):
            changed = [name for name, value in call.arguments.items() if value != kept.arguments[name]]
            if changed:
                fault(f"{call.hook} changed its argument {', '.join(changed)}; work on a copy")

    def test_the_process_stays_as_it_is(self, open_run: Open, context: RunInfo) -> None:
        """Its directory, environment and logging belong to the run and to every other plugin."""
        before = Surroundings.look()
        calls = chain(story.beginning(), story.steps(1, 3), story.ending("finished"))
        _follow(open_run(context), calls, "an ordinary run")
        for problem in before.problems(Surroundings.look(), self.own_variables):
            fault(f"the hook {problem}")

    def test_two_runs_in_one_process_do_not_mix(self, open_run: Open, tmp_path: Path) -> None:
        """Its memory belongs to the object of one run, never to the module."""
        marks = {"first-4711": 0.8123456789, "second-0815": 0.9876543219}
        runs = {name: story.run_info(_folder(tmp_path, name), name) for name in marks}
        sessions = {name: open_run(run) for name, run in runs.items()}
        acts: tuple[Callable[[float], Iterable[story.Call]], ...] = (
            lambda _: story.beginning(),
            lambda accuracy: story.steps(1, 3, accuracy=accuracy),
            lambda accuracy: story.steps(4, 6, accuracy=accuracy),
            lambda accuracy: story.ending("finished", accuracy=accuracy),
        )
        for act in acts:
            for name, session in sessions.items():
                _tell(session, act(marks[name]), f"the run {name!r} beside another one")
        for session in sessions.values():
            session.close()
        numbers = {name: len(_files(run.directory)) for name, run in runs.items()}
        if len(set(numbers.values())) > 1:
            fault(f"two runs that were told the same left {numbers} files in their folders; use RunInfo.directory only")
        for name, other in zip(marks, reversed(marks), strict=True):
            _check_free_of(runs[name].directory, other, marks[other])

    def test_nothing_is_left_when_the_run_is_over(
        self, options: Mapping[str, JSON], context: RunInfo, tmp_path: Path
    ) -> None:
        """`cosmos run` must be able to end, with no process left behind."""
        order = story.Order(
            plugin=self.plugin,
            options=options,
            run_id=context.run_id,
            name=context.name,
            directory=str(context.directory),
            recipe=context.recipe,
            timeout_s=self.timeout_s,
        )
        left, took_s = _run_apart(order, tmp_path / "output.txt", self.timeout_s)
        if left.processes:
            fault(f"when the run was over, processes were left behind: {', '.join(left.processes)}; end them in time")
        if took_s > self.timeout_s:
            names = ", ".join(left.threads) or "none that Python knows"
            fault(
                f"the process did not end within {self.timeout_s:g} s after its run was over (threads that it waits "
                f"for: {names}); make threads daemons, or end them in cosmos_run_ended"
            )

    def _in_time(self, make: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return make_in_time(self.plugin, functools.partial(make, *args, **kwargs), self.timeout_s)
            except PluginBrokenError as error:
                return fault(str(error))

        return call


def _folder(parent: Path, name: str) -> Path:
    (parent / name).mkdir()
    return parent / name


def _tell(session: HookSession, calls: Iterable[story.Call], what: str) -> None:
    session.tell(calls)
    if session.problems:
        fault(f"in {what}: {session.problems[0]}")


def _follow(session: HookSession, calls: Iterable[story.Call], what: str) -> None:
    _tell(session, calls, what)
    session.close()
    if session.problems:
        fault(f"at the end of {what}: {session.problems[0]}")


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def _check_free_of(folder: Path, other: str, accuracy: float) -> None:
    """Check that no file tells of another run: its name, or its accuracy as text or as a double."""
    signs = (other.encode(), f"{accuracy}".encode(), struct.pack(">d", accuracy), struct.pack("<d", accuracy))
    for path in _files(folder):
        content = path.read_bytes()
        if any(sign in content for sign in signs):
            fault(
                f"{path.relative_to(folder)} of the run {folder.name!r} tells of the run {other!r}; keep what is "
                "remembered in the object that Provider.create makes, not in the module or the class"
            )


def _run_apart(order: story.Order, output: Path, timeout_s: float) -> tuple[story.Left, float]:
    """Run in a process of its own: what was left when the run was over, and the seconds from there to its end."""
    command = [sys.executable, "-P", "-m", story.__name__, msgspec.json.encode(order).decode()]
    with output.open("w+b") as file:
        # Into a file: a process that is left behind would hold a pipe open.
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            left = _wait_left(process, output, _START_S + 10 * timeout_s)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout_s + 0.5)
            return left, time.time() - left.ended_at
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait_left(process: subprocess.Popen[Any], output: Path, timeout_s: float) -> story.Left:
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        has_ended = process.poll() is not None
        for line in output.read_bytes().splitlines():
            if line.startswith(b'{"ended_at"'):
                return msgspec.json.decode(line, type=story.Left)
        if has_ended:
            break
        time.sleep(0.02)
    printed = output.read_text(errors="replace").splitlines()[-5:]
    return fault(f"the run did not come to its end in a process of its own: {' | '.join(printed) or 'no output'}")
