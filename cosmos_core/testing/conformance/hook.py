"""The kit for hooks.

`python -m cosmos_core.testing.conformance.hook ORDER ANSWER` tells a hook of a made-up run as `cosmos run` does. It
writes to the file ANSWER what is left when the run is over, and must then be able to end.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import logging
import math
import os
import queue
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, Final, NamedTuple, TypeAlias, final
from unittest import mock

import attrs
import pluggy
import psutil
import pytest

from cosmos_core.config.schema import Recipe
from cosmos_core.config.structure import structure, unstructure
from cosmos_core.plugins.selection import PluginSet
from cosmos_core.protocols import KINDS, Kind, Provider, RunInfo
from cosmos_core.run.hooks import HookRunner, make_in_time
from cosmos_core.testing.conformance.plugin import Make, PluginConformance, fault, fault_if
from cosmos_core.testing.conformance.processes import exchange
from cosmos_core.types import JSON

_START_S: Final = 60.0
_LAST_LINES: Final = 5
_RECIPE: Final[Mapping[str, JSON]] = {
    "run": {"name": "kit", "steps": 3},
    "model": {"config": {"model_type": "qwen3", "layer_types": ["full_attention"]}},
    "algorithm": {"plugin": "grpo"},
    "policy": {"optimizer": {"lr": 1e-6}},
    "dataset": {"plugin": "arithmetic", "options": {"max_operand": 9}},
    "reward": [{"plugin": "math"}, {"plugin": "brevity", "weight": 0.5}],
}
_LATE: Final = 97
"""Exit code of a process that did not end in time once its run was over."""
_GONE_S: Final = 5.0


class Call(NamedTuple):
    """One call of a lifecycle hook, of which `cosmos_` and the argument `run` are left out."""

    event: str
    arguments: Mapping[str, Any]


def _run_info(directory: Path, name: str) -> RunInfo:
    """A run with a complete recipe."""
    recipe = unstructure(structure(_RECIPE, Recipe))
    recipe["run"]["name"] = name
    return RunInfo(run_id=f"{name}-1a2b", name=name, directory=directory, recipe=recipe)


def _beginning() -> Iterator[Call]:
    """Up to the first weights."""
    yield Call("run_started", {})
    for role in ("policy", "rollout"):
        yield Call("replica_joined", {"replica": f"{role}-0", "role": role})
    yield Call("weights_published", {"version": 0, "digest": "0f" * 16})
    yield _evaluated(0, 0.125)


def _steps(first: int, last: int, *, accuracy: float = 0.25) -> Iterator[Call]:
    """Some training steps, an evaluation and a checkpoint."""
    for step in range(first, last + 1):
        metrics = {"train/loss": 1.0 / step, "train/lr": 1e-3, "reward/mean": 0.5, "batch/samples": 8}
        yield Call("step_finished", {"step": step, "metrics": metrics})
        yield Call("weights_published", {"version": step, "digest": f"{step:032x}"})
    yield _evaluated(last, accuracy)
    yield Call("checkpoint_saved", {"step": last, "path": f"checkpoints/step-{last}"})


def _ending(outcome: str = "finished", *, accuracy: float | None = 0.25) -> Iterator[Call]:
    """The end of a run."""
    yield Call("replica_left", {"replica": "rollout-0", "role": "rollout", "reason": "stopped"})
    summary: dict[str, JSON] = {
        "outcome": outcome,
        "reason": "" if outcome == "finished" else "the controller was lost",
        "steps": 3,
        "wall_s": 12.5,
        "heldout_accuracy_after": accuracy,
        "evaluations": [] if accuracy is None else [{"step": 3, "accuracy": accuracy}],
        "samples": {"generated": 24, "dropped": {}},
    }
    yield Call("run_ended", {"outcome": outcome, "summary": summary})


def _ordinary() -> list[Call]:
    """A whole run."""
    return [*_beginning(), *_steps(1, 3), *_ending()]


def _oddities() -> Iterator[Call]:
    """Rare and allowed events: numbers that are none, nothing at all, names from all over the world."""
    for key, before, after in (
        ("policy.optimizer.lr", 1e-6, 0.0),
        ("algorithm.options.dual_clip", None, 3),
        ("algorithm.options.größe 大きさ", "a", "y" * 10_000),
        ("algorithm.options.dynamic_sampling", True, False),
    ):
        yield Call("setting_changed", {"step": 4, "key": key, "before": before, "after": after})
    rare = {"train/loss": math.nan, "train/gradient_norm": math.inf, "reward/mean": -math.inf, "train/steps": 2**60}
    named = {"reward/größe — 大きさ 🙂": 1.0, "a b?#%'\"/..": 0.0, "x" * 400: 1e-300}
    for step, metrics in ((4, {}), (5, rare), (6, named), (10**12, {"train/loss": 0.0})):
        yield Call("step_finished", {"step": step, "metrics": metrics})
        yield Call("evaluation_finished", {"step": step, "metrics": metrics})
    yield Call("replica_joined", {"replica": "rollout-größe", "role": "rollout"})
    reason = "lost: “keine Antwort”\n" + "y" * 10_000
    yield Call("replica_left", {"replica": "policy-0", "role": "policy", "reason": reason})
    yield Call("checkpoint_saved", {"step": 7, "path": "s3://bucket/a folder/ü/step-7"})


def _evaluated(step: int, accuracy: float) -> Call:
    metrics = {"heldout/accuracy": accuracy, "heldout/unscored": 0, "heldout/reward": accuracy}
    return Call("evaluation_finished", {"step": step, "metrics": metrics})


@final
class HookSession:
    """Makes the hook for a run and tells it what happens.

    Attributes:
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
        self._run: Final = run
        self._timeout_s: Final = timeout_s
        self._place = ""
        self._answers: Final[queue.SimpleQueue[str]] = queue.SimpleQueue()
        """What the run would report of each call; an empty text of one that returned."""
        self.manager.add_hookcall_monitoring(lambda *_: None, self._after)
        self._runner: Final = HookRunner(self.manager, [f"hook:{plugin}:instance"], self._report)

    def tell(self, calls: Iterable[Call]) -> str:
        """Tell what happens, each call once the last has returned; the first problem, or an empty text."""
        for call in calls:
            self._runner.notify(f"cosmos_{call.event}", run=self._run, **call.arguments)
            try:
                problem = self._answers.get(timeout=self._timeout_s)
            except queue.Empty:
                problem = (
                    f"cosmos_{call.event} has not returned after {self._timeout_s:g} s; do slow work on a daemon "
                    "thread and wait for it, with a bound, in cosmos_run_ended"
                )
            if problem:
                return problem
        return ""

    def close(self) -> None:
        """End as a run does."""
        self._runner.close(self._timeout_s)

    def _after(self, outcome: pluggy.Result[Any], *_: object) -> None:
        if outcome.exception is None:
            self._answers.put("")
        else:
            frame = traceback.extract_tb(outcome.exception.__traceback__)[-1]
            self._place = f" ({frame.filename}, line {frame.lineno})"

    def _report(self, problem: str) -> None:
        self._answers.put(f"{problem}{self._place}")


class Surroundings(NamedTuple):
    """The parts of the process that belong to the run and to every plugin in it."""

    folder: Path
    environment: Mapping[str, str]
    disabled: int
    level: int

    @classmethod
    def now(cls) -> Surroundings:
        """The surroundings in this process."""
        # pytest keeps its own account in one variable.
        environment = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
        return cls(Path.cwd(), environment, logging.root.manager.disable, logging.root.level)

    def changes(self, allowed: Sequence[str]) -> Iterator[str]:
        """Changes since then that should not be; variables that begin with one of `allowed` may change."""
        now = Surroundings.now()
        if now.folder != self.folder:
            yield f"the hook changed the working directory to {now.folder}; use absolute paths"
        changed = {name for name, _ in self.environment.items() ^ now.environment.items()}
        if names := sorted(name for name in changed if not name.startswith(tuple(allowed))):
            yield (
                f"the hook changed the environment variables {', '.join(names)}, which the run's processes inherit; "
                "give settings to the library itself, or name its prefix in `own_variables` of the test class"
            )
        if now.disabled != self.disabled:
            yield "the hook called logging.disable, which silences the run; set the level of its own logger"
        if now.level != self.level:
            level = logging.getLevelName(now.level)
            yield f"the hook set the level of the root logger to {level}; set the level of its own logger"


Open: TypeAlias = Callable[[RunInfo], HookSession]


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
        return _run_info(_folder(tmp_path, "a run"), "a-run")

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
        calls = _ordinary()
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
        _follow(open_run(run), "a run", _beginning(), _steps(1, 3), _ending("stopped"))
        again = attrs.evolve(run, resumed_from=2)
        _follow(open_run(again), "its resumption", _beginning(), _steps(3, 5), _ending())
        failing = attrs.evolve(context, directory=_folder(context.directory, "failing"))
        begun = [*_beginning()][:1]
        _follow(open_run(failing), "a run that fails at once", begun, _ending("failed", accuracy=None))
        odd = attrs.evolve(context, directory=_folder(context.directory, "odd"))
        what = "a run with odd metrics (empty, nan, inf, unicode)"
        _follow(open_run(odd), what, _beginning(), _steps(1, 3), _oddities(), _ending())

    def test_two_runs_in_one_process_do_not_mix(self, open_run: Open, tmp_path: Path) -> None:
        """A hook's memory belongs to the object of one run, never to the module."""
        marks = {"first-4711": 0.8123456789, "second-0815": 0.9876543219}
        runs = {name: _run_info(_folder(tmp_path, name), name) for name in marks}
        sessions = {name: open_run(run) for name, run in runs.items()}
        acts: tuple[Callable[[float], Iterable[Call]], ...] = (
            lambda _: _beginning(),
            lambda accuracy: _steps(1, 3, accuracy=accuracy),
            lambda accuracy: _steps(4, 6, accuracy=accuracy),
            lambda accuracy: _ending(accuracy=accuracy),
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
        left, code, output = exchange(__name__, told, dict[str, list[str]], timeout_s=limit_s, environment={})
        if left is None:
            printed = " | ".join(output.splitlines()[-_LAST_LINES:])
            fault(f"the run did not come to its end in a process of its own: {printed or 'no output'}")
        if names := ", ".join(left["processes"]):
            fault(f"when the run was over, processes were left behind: {names}; end them in time")
        if code in (None, _LATE):
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


def _tell(session: HookSession, calls: Iterable[Call], what: str) -> None:
    if problem := session.tell(calls):
        fault(f"in {what}: {problem}")


def _follow(session: HookSession, what: str, *calls: Iterable[Call]) -> None:
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


def _main(order: Mapping[str, Any], answer: Path) -> None:
    """Follow a run to its end and tell what is left."""
    run = RunInfo(**{**order["run"], "directory": Path(order["run"]["directory"])})
    session = HookSession(order["plugin"], order["options"], run, timeout_s=order["timeout_s"])
    session.tell(_ordinary())
    session.close()
    # Python waits for these at its end.
    threads = [each.name for each in threading.enumerate() if not each.daemon and each is not threading.main_thread()]
    end = time.monotonic() + _GONE_S
    while (children := psutil.Process().children(recursive=True)) and time.monotonic() < end:
        psutil.wait_procs(children, timeout=0.1)
    processes = [" ".join(child.cmdline()) or f"process {child.pid}" for child in children]
    answer.write_text(json.dumps({"threads": threads, "processes": processes}))
    timer = threading.Timer(order["timeout_s"], os._exit, (_LATE,))
    timer.daemon = True
    timer.start()


if __name__ == "__main__":
    _main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), Path(sys.argv[2]))
