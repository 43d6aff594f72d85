"""Tells a hook of a made-up run as `cosmos run` does: `python -m cosmos_core.testing.conformance.story JSON`.

The process prints one line of JSON when the run is over, and must then be able to end.
"""

from __future__ import annotations

import functools
import logging
import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Final, final

import attrs
import msgspec
import pluggy
import psutil

from cosmos_core.config.schema import Recipe
from cosmos_core.config.structure import structure, unstructure
from cosmos_core.plugins.selection import PluginSet
from cosmos_core.protocols import RunInfo
from cosmos_core.run.hooks import HookRunner, make_in_time
from cosmos_core.types import JSON

_RECIPE: Final[Mapping[str, JSON]] = {
    "run": {"name": "kit", "steps": 3},
    "model": {"config": {"model_type": "qwen3", "layer_types": ["full_attention"]}},
    "algorithm": {"plugin": "grpo"},
    "dataset": {"plugin": "arithmetic", "options": {"max_operand": 9}},
    "reward": [{"plugin": "math"}, {"plugin": "brevity", "weight": 0.5}],
}


@attrs.frozen(kw_only=True)
class Call:
    """One call of a lifecycle hook; `run` is added to its arguments."""

    hook: str
    arguments: Mapping[str, Any] = attrs.field(factory=dict)


def run_info(directory: Path, name: str, *, resumed_from: int | None = None) -> RunInfo:
    """A run with a complete recipe."""
    recipe = unstructure(structure(_RECIPE, Recipe))
    recipe["run"]["name"] = name
    return RunInfo(run_id=f"{name}-1a2b", name=name, directory=directory, recipe=recipe, resumed_from=resumed_from)


def beginning() -> Iterator[Call]:
    """Up to the first weights."""
    yield Call(hook="cosmos_run_started")
    for role in ("policy", "rollout"):
        yield Call(hook="cosmos_replica_joined", arguments={"replica": f"{role}-0", "role": role})
    yield Call(hook="cosmos_weights_published", arguments={"version": 0, "digest": "0f" * 16})
    yield _evaluated(0, 0.125)


def steps(first: int, last: int, *, accuracy: float = 0.25) -> Iterator[Call]:
    """Some training steps, an evaluation and a checkpoint."""
    for step in range(first, last + 1):
        metrics = {
            "train/loss": 1.0 / step,
            "train/lr": 1e-3,
            "reward/mean": 0.5,
            "batch/samples": 8,
            "staleness/max": 1,
        }
        yield Call(hook="cosmos_step_finished", arguments={"step": step, "metrics": metrics})
        yield Call(hook="cosmos_weights_published", arguments={"version": step, "digest": f"{step:032x}"})
    yield _evaluated(last, accuracy)
    yield Call(hook="cosmos_checkpoint_saved", arguments={"step": last, "path": f"checkpoints/step-{last}"})


def ending(outcome: str, *, accuracy: float | None = 0.25) -> Iterator[Call]:
    """The end of a run."""
    left = {"replica": "rollout-0", "role": "rollout", "reason": "stopped"}
    yield Call(hook="cosmos_replica_left", arguments=left)
    summary: dict[str, JSON] = {
        "outcome": outcome,
        "reason": "" if outcome == "finished" else "the controller was lost",
        "steps": 3,
        "wall_s": 12.5,
        "heldout_accuracy_after": accuracy,
        "evaluations": [] if accuracy is None else [{"step": 3, "accuracy": accuracy}],
        "samples": {"generated": 24, "dropped": {}},
    }
    yield Call(hook="cosmos_run_ended", arguments={"outcome": outcome, "summary": summary})


def oddities() -> Iterator[Call]:
    """Rare and allowed events: numbers that are none, nothing at all, names from all over the world."""
    for key, before, after in (
        ("policy.optimizer.lr", 1e-6, 0.0),
        ("algorithm.options.dual_clip", None, 3),
        ("algorithm.options.größe 大きさ", "a", "y" * 10_000),
        ("algorithm.options.dynamic_sampling", True, False),
    ):
        yield Call(hook="cosmos_setting_changed", arguments={"step": 4, "key": key, "before": before, "after": after})
    rare = {"train/loss": math.nan, "train/gradient_norm": math.inf, "reward/mean": -math.inf, "train/steps": 2**60}
    for step, metrics in enumerate(
        ({}, rare, {"reward/größe — 大きさ 🙂": 1.0, "a b?#%'\"/..": 0.0}, {"x" * 400: 1e-300}), 4
    ):
        yield Call(hook="cosmos_step_finished", arguments={"step": step, "metrics": metrics})
        yield Call(hook="cosmos_evaluation_finished", arguments={"step": step, "metrics": metrics})
    yield Call(hook="cosmos_step_finished", arguments={"step": 10**12, "metrics": {"train/loss": 0.0}})
    yield Call(hook="cosmos_replica_joined", arguments={"replica": "rollout-größe", "role": "rollout"})
    yield Call(
        hook="cosmos_replica_left",
        arguments={"replica": "policy-0", "role": "policy", "reason": "lost: “keine Antwort”\n" + "y" * 10_000},
    )
    yield Call(hook="cosmos_checkpoint_saved", arguments={"step": 7, "path": "s3://bucket/a folder/ü/step-7"})


def _evaluated(step: int, accuracy: float) -> Call:
    metrics = {"heldout/accuracy": accuracy, "heldout/unscored": 0, "heldout/reward": accuracy}
    return Call(hook="cosmos_evaluation_finished", arguments={"step": step, "metrics": metrics})


_POLL_S: Final = 0.005


@final
class HookSession:
    """Makes the hook for a run and tells it what happens.

    Attributes:
        problems: What the run would report of the hook, and the calls that took too long.
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
        self.problems: Final[list[str]] = []
        self._run: Final = run
        self._timeout_s: Final = timeout_s
        self._told = self._answered = 0
        self._under_way = ""
        self._place = ""
        self.manager.add_hookcall_monitoring(self._before, self._after)
        self._runner: Final = HookRunner(self.manager, [f"hook:{plugin}:instance"], self._note)

    def tell(self, calls: Iterable[Call]) -> None:
        """Tell what happens, and wait until the hook has taken it in; stops at the first problem."""
        for call in calls:
            self._told += 1
            self._runner.notify(call.hook, run=self._run, **call.arguments)
        answered, since = self._answered, time.monotonic()
        while self._answered < self._told and not self.problems:
            if answered != self._answered:
                answered, since = self._answered, time.monotonic()
            elif time.monotonic() - since > self._timeout_s:
                self.problems.append(self._stalled())
            time.sleep(_POLL_S)

    def close(self) -> None:
        """End as a run does."""
        self._runner.close(0.0 if self.problems else self._timeout_s)

    def _stalled(self) -> str:
        if not self._under_way:
            return f"it took in {self._answered} of {self._told} calls and no more; never end the thread that calls it"
        return (
            f"{self._under_way} has not returned after {self._timeout_s:g} s; do slow work on a daemon thread and "
            "wait for it, with a bound, in cosmos_run_ended"
        )

    def _before(self, hook: str, *_: object) -> None:
        self._under_way = hook

    def _after(self, outcome: pluggy.Result[Any], *_: object) -> None:
        if outcome.exception is not None:
            frame = traceback.extract_tb(outcome.exception.__traceback__)[-1]
            self._place = f" ({frame.filename}, line {frame.lineno})"
        self._under_way = ""
        self._answered += 1

    def _note(self, problem: str) -> None:
        self.problems.append(f"{problem}{self._place}")


_GONE_S: Final = 5.0


@attrs.frozen(kw_only=True)
class Order:
    """The run that is asked for.

    Attributes:
        plugin: The hook's name in recipes.
        options: Its options.
        run_id: Of the run, like the following ones.
        name: Name of the run.
        directory: The run's folder.
        recipe: The run's recipe.
        timeout_s: Longest time for one call.
    """

    plugin: str
    options: Mapping[str, JSON]
    run_id: str
    name: str
    directory: str
    recipe: Mapping[str, JSON]
    timeout_s: float


@attrs.frozen(kw_only=True)
class Left:
    """Threads and processes that were there when the run was over.

    Attributes:
        ended_at: Unix time.
        threads: Names of threads that Python waits for at its end.
        processes: Command lines of child processes.
    """

    ended_at: float
    threads: list[str]
    processes: list[str]


def main(order: Order) -> None:
    """Follow a run to its end and tell what is left."""
    run = RunInfo(run_id=order.run_id, name=order.name, directory=Path(order.directory), recipe=order.recipe)
    session = HookSession(order.plugin, order.options, run, timeout_s=order.timeout_s)
    session.tell(chain(beginning(), steps(1, 3), ending("finished")))
    session.close()
    left = Left(ended_at=time.time(), threads=_threads(), processes=_processes())
    sys.stdout.write(f"\n{msgspec.json.encode(left).decode()}\n")
    sys.stdout.flush()


def _threads() -> list[str]:
    return [each.name for each in threading.enumerate() if not each.daemon and each is not threading.main_thread()]


def _processes() -> list[str]:
    end = time.monotonic() + _GONE_S
    while (children := psutil.Process().children(recursive=True)) and time.monotonic() < end:
        psutil.wait_procs(children, timeout=0.1)
    return [" ".join(child.cmdline()) or f"process {child.pid}" for child in children]


if __name__ == "__main__":
    main(msgspec.json.decode(sys.argv[1], type=Order))


# pytest keeps its own account there.
_IGNORED = "PYTEST_CURRENT_TEST"


@attrs.frozen(kw_only=True)
class Surroundings:
    """The process at one moment.

    Attributes:
        directory: The working directory.
        environment: Environment variables.
        disabled: The level up to which `logging.disable` silences every logger.
        root_level: The level of the root logger.
    """

    directory: str
    environment: Mapping[str, str]
    disabled: int
    root_level: int

    @classmethod
    def look(cls) -> Surroundings:
        """The process at this moment."""
        return cls(
            directory=os.getcwd(),  # noqa: PTH109 - kept as text, to be compared and shown
            environment={name: value for name, value in os.environ.items() if name != _IGNORED},
            disabled=logging.root.manager.disable,
            root_level=logging.root.level,
        )

    def restore(self) -> None:
        """Make the process what it was."""
        os.chdir(self.directory)
        for name in self.environment_changed(Surroundings.look()):
            os.environ.pop(name, None)
            if name in self.environment:
                os.environ[name] = self.environment[name]
        logging.disable(self.disabled)
        logging.root.setLevel(self.root_level)

    def environment_changed(self, later: Surroundings) -> list[str]:
        """Names of the variables that were set, changed or removed since."""
        names = {*self.environment, *later.environment}
        return sorted(name for name in names if self.environment.get(name) != later.environment.get(name))

    def problems(self, later: Surroundings, allowed: Sequence[str]) -> Iterator[str]:
        """Changes since then that should not be; variables that begin with one of `allowed` may change."""
        if later.directory != self.directory:
            yield f"changed the working directory to {later.directory}; use absolute paths"
        names = [name for name in self.environment_changed(later) if not name.startswith(tuple(allowed))]
        if names:
            yield (
                f"changed the environment variables {', '.join(names)}, which the run's processes inherit; give "
                "settings to the library itself, or name the library's prefix in `own_variables` of the test class"
            )
        if later.disabled != self.disabled:
            yield "called logging.disable, which silences the run; set the level of its own logger"
        if later.root_level != self.root_level:
            level = logging.getLevelName(later.root_level)
            yield f"set the level of the root logger to {level}; set the level of its own logger"
