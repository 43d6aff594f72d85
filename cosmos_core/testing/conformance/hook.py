"""The kit for hooks."""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, Final, TypeAlias
from unittest import mock

import attrs
import pytest

from cosmos_core.plugins.selection import PluginSet
from cosmos_core.protocols import KINDS, Kind, Provider, RunInfo
from cosmos_core.run.hooks import make_in_time
from cosmos_core.testing.conformance import story
from cosmos_core.testing.conformance.plugin import Make, PluginConformance, fault, fault_if
from cosmos_core.testing.conformance.processes import exchange
from cosmos_core.testing.conformance.story import HookSession, Surroundings
from cosmos_core.types import JSON

Open: TypeAlias = Callable[[RunInfo], HookSession]

_START_S: Final = 60.0
_LAST_LINES: Final = 5


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
        before = Surroundings.now()
        with mock.patch.dict(os.environ), contextlib.chdir(before.folder):
            yield
        logging.disable(before.disabled)
        logging.root.setLevel(before.level)

    @pytest.fixture
    def provider(self, plugins: PluginSet) -> Provider[Any]:
        """The provider that the plugin's hook returned, which must make the hook in time."""
        provider = plugins.provider(self.kind, self.plugin)
        return attrs.evolve(provider, create=functools.partial(self._in_time, provider.create))

    @pytest.fixture
    def make(self, plugins: PluginSet, options: Mapping[str, JSON], context: RunInfo) -> Make:
        """A function that makes a hook, in time."""
        create = functools.partial(plugins.create, self.kind, self.plugin)
        return functools.partial(self._in_time, lambda **changes: create({**options, **changes}, context))

    @pytest.fixture
    def open_run(self, options: Mapping[str, JSON]) -> Open:
        """A function that makes the hook for a run."""
        return functools.partial(HookSession, self.plugin, options, timeout_s=self.timeout_s)

    def test_it_implements_lifecycle_hooks(self, open_run: Open, context: RunInfo) -> None:
        """A hook that is misspelt, unmarked or in the wrong place would never be called."""
        session = open_run(context)
        marked = {caller.name for caller in session.manager.get_hookcallers(session.instance) or []}
        hook = type(session.instance).__name__
        if unmarked := sorted(name for name in {*dir(session.instance)} - marked if name.startswith("cosmos_")):
            fault(f"{', '.join(unmarked)} of {hook} lacks @hookimpl: it is never called")
        module = session.manager.get_plugin(f"hook:{self.plugin}")
        provided = {caller.name for caller in session.manager.get_hookcallers(module) or []}
        if stray := sorted(provided - {f"cosmos_{kind}" for kind in KINDS}):
            fault(
                f"{', '.join(stray)} is implemented by the plugin's module, where a run never calls it; make it a "
                "method of the object that Provider.create returns"
            )
        if not marked:
            fault(
                f"{hook} implements no lifecycle hook, so it is never told anything; mark methods such as "
                "cosmos_step_finished with @hookimpl on the object that Provider.create returns"
            )
        session.close()

    def test_an_ordinary_run_is_followed_and_left_as_it_is(self, open_run: Open, context: RunInfo) -> None:
        """It never breaks or blocks a run; what it is told, and its process, belong to other plugins too."""
        calls = story.ordinary()
        recipe, kept, before = *copy.deepcopy((context.recipe, calls)), Surroundings.now()
        _follow(open_run(context), "an ordinary run", calls)
        fault_if(before.changes(self.own_variables))
        if context.recipe != recipe:
            fault("the hook changed run.recipe; work on a copy")
        for call, (_, arguments) in zip(calls, kept, strict=True):
            if changed := [name for name, value in call.arguments.items() if value != arguments[name]]:
                fault(f"cosmos_{call.event} changed its argument {', '.join(changed)}; work on a copy")

    def test_rare_runs_are_followed(self, open_run: Open, context: RunInfo) -> None:
        """One finds what it left behind; one has no step and no evaluation; one has metrics that are no numbers."""
        run = attrs.evolve(context, directory=_folder(context.directory, "resumed"))
        _follow(open_run(run), "a run", story.beginning(), story.steps(1, 3), story.ending("stopped"))
        again = attrs.evolve(run, resumed_from=2)
        _follow(open_run(again), "its resumption", story.beginning(), story.steps(3, 5), story.ending())
        failing = attrs.evolve(context, directory=_folder(context.directory, "failing"))
        begun = [*story.beginning()][:1]
        _follow(open_run(failing), "a run that fails at once", begun, story.ending("failed", accuracy=None))
        odd = attrs.evolve(context, directory=_folder(context.directory, "odd"))
        what = "a run with odd metrics (empty, nan, inf, unicode)"
        _follow(open_run(odd), what, story.beginning(), story.steps(1, 3), story.oddities(), story.ending())

    def test_two_runs_in_one_process_do_not_mix(self, open_run: Open, tmp_path: Path) -> None:
        """Its memory belongs to the object of one run, never to the module."""
        marks = {"first-4711": 0.8123456789, "second-0815": 0.9876543219}
        runs = {name: story.run_info(_folder(tmp_path, name), name) for name in marks}
        sessions = {name: open_run(run) for name, run in runs.items()}
        acts: tuple[Callable[[float], Iterable[story.Call]], ...] = (
            lambda _: story.beginning(),
            lambda accuracy: story.steps(1, 3, accuracy=accuracy),
            lambda accuracy: story.steps(4, 6, accuracy=accuracy),
            lambda accuracy: story.ending(accuracy=accuracy),
        )
        for act in acts:
            for name, session in sessions.items():
                _tell(session, act(marks[name]), f"the run {name!r} beside another one")
        for session in sessions.values():
            session.close()
        numbers = {name: len([*_files(run.directory)]) for name, run in runs.items()}
        if len(set(numbers.values())) > 1:
            fault(f"two runs that were told the same left {numbers} files in their folders; use RunInfo.directory only")
        for name, other in zip(marks, reversed(marks), strict=True):
            _check_free_of(runs[name].directory, other, marks[other])

    def test_nothing_is_left_when_the_run_is_over(self, options: Mapping[str, JSON], context: RunInfo) -> None:
        """`cosmos run` must be able to end, with no process left behind."""
        run = attrs.asdict(context) | {"directory": str(context.directory)}
        told = {"plugin": self.plugin, "options": options, "run": run, "timeout_s": self.timeout_s}
        limit_s = _START_S + 10 * self.timeout_s
        left, code, output = exchange(story.__name__, told, dict[str, list[str]], timeout_s=limit_s, environment={})
        if left is None:
            printed = " | ".join(output.splitlines()[-_LAST_LINES:])
            fault(f"the run did not come to its end in a process of its own: {printed or 'no output'}")
        if names := ", ".join(left["processes"]):
            fault(f"when the run was over, processes were left behind: {names}; end them in time")
        if code in (None, story.LATE):
            names = ", ".join(left["threads"]) or "none that Python knows"
            fault(
                f"the process did not end within {self.timeout_s:g} s after its run was over (threads that it waits "
                f"for: {names}); make threads daemons, or end them in cosmos_run_ended"
            )

    def _in_time(self, make: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return make_in_time(self.plugin, functools.partial(make, *args, **kwargs), self.timeout_s)


def _folder(parent: Path, name: str) -> Path:
    (parent / name).mkdir()
    return parent / name


def _tell(session: HookSession, calls: Iterable[story.Call], what: str) -> None:
    if problem := session.tell(calls):
        fault(f"in {what}: {problem}")


def _follow(session: HookSession, what: str, *calls: Iterable[story.Call]) -> None:
    _tell(session, chain(*calls), what)
    session.close()


def _files(folder: Path) -> Iterator[Path]:
    return filter(Path.is_file, folder.rglob("*"))


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
