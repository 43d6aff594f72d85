"""Tells a hook of a made-up run as `cosmos run` does: `python -m cosmos_core.testing.conformance.story ORDER ANSWER`.

The process writes to the file ANSWER what is left when the run is over, and must then be able to end.
"""

from __future__ import annotations

import functools
import json
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
from typing import Any, Final, NamedTuple, final

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
LATE: Final = 97
"""Exit code of a process that did not end in time once its run was over."""
_GONE_S: Final = 5.0
_POLL_S: Final = 0.005


class Call(NamedTuple):
    """One call of a lifecycle hook, of which `cosmos_` and the argument `run` are left out."""

    event: str
    arguments: Mapping[str, Any]


def run_info(directory: Path, name: str) -> RunInfo:
    """A run with a complete recipe."""
    recipe = unstructure(structure(_RECIPE, Recipe))
    recipe["run"]["name"] = name
    return RunInfo(run_id=f"{name}-1a2b", name=name, directory=directory, recipe=recipe)


def beginning() -> Iterator[Call]:
    """Up to the first weights."""
    yield Call("run_started", {})
    for role in ("policy", "rollout"):
        yield Call("replica_joined", {"replica": f"{role}-0", "role": role})
    yield Call("weights_published", {"version": 0, "digest": "0f" * 16})
    yield _evaluated(0, 0.125)


def steps(first: int, last: int, *, accuracy: float = 0.25) -> Iterator[Call]:
    """Some training steps, an evaluation and a checkpoint."""
    for step in range(first, last + 1):
        metrics = {"train/loss": 1.0 / step, "train/lr": 1e-3, "reward/mean": 0.5}
        yield Call("step_finished", {"step": step, "metrics": {**metrics, "batch/samples": 8, "staleness/max": 1}})
        yield Call("weights_published", {"version": step, "digest": f"{step:032x}"})
    yield _evaluated(last, accuracy)
    yield Call("checkpoint_saved", {"step": last, "path": f"checkpoints/step-{last}"})


def ending(outcome: str = "finished", *, accuracy: float | None = 0.25) -> Iterator[Call]:
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


def ordinary() -> Iterator[Call]:
    """A whole run."""
    return chain(beginning(), steps(1, 3), ending())


def oddities() -> Iterator[Call]:
    """Rare and allowed events: numbers that are none, nothing at all, names from all over the world."""
    for key, before, after in (
        ("policy.optimizer.lr", 1e-6, 0.0),
        ("algorithm.options.dual_clip", None, 3),
        ("algorithm.options.größe 大きさ", "a", "y" * 10_000),
        ("algorithm.options.dynamic_sampling", True, False),
    ):
        yield Call("setting_changed", {"step": 4, "key": key, "before": before, "after": after})
    rare = {"train/loss": math.nan, "train/gradient_norm": math.inf, "reward/mean": -math.inf, "train/steps": 2**60}
    named = {"reward/größe — 大きさ 🙂": 1.0, "a b?#%'\"/..": 0.0}
    for step, metrics in enumerate(({}, rare, named, {"x" * 400: 1e-300}), 4):
        yield Call("step_finished", {"step": step, "metrics": metrics})
        yield Call("evaluation_finished", {"step": step, "metrics": metrics})
    yield Call("step_finished", {"step": 10**12, "metrics": {"train/loss": 0.0}})
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
        self._under_way = self._place = ""
        self.manager.add_hookcall_monitoring(self._before, self._after)
        self._runner: Final = HookRunner(self.manager, [f"hook:{plugin}:instance"], self._note)

    def tell(self, calls: Iterable[Call]) -> None:
        """Tell what happens, and wait until the hook has taken it in; stops at the first problem."""
        for call in calls:
            self._told += 1
            self._runner.notify(f"cosmos_{call.event}", run=self._run, **call.arguments)
        answered = -1
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


def surroundings() -> dict[str, Any]:
    """The parts of the process that belong to the run and to every plugin in it."""
    # pytest keeps its own account in one variable.
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    return {
        "directory": Path.cwd(),
        "environment": environment,
        "disabled": logging.root.manager.disable,
        "level": logging.root.level,
    }


def restore(before: Mapping[str, Any]) -> None:
    """Make the process what it was."""
    os.chdir(before["directory"])
    for name in _changed_variables(before, surroundings()):
        os.environ.pop(name, None)
        if name in before["environment"]:
            os.environ[name] = before["environment"][name]
    logging.disable(before["disabled"])
    logging.root.setLevel(before["level"])


def changes(before: Mapping[str, Any], allowed: Sequence[str]) -> Iterator[str]:
    """Changes of the process that should not be; variables that begin with one of `allowed` may change."""
    now = surroundings()
    if now["directory"] != before["directory"]:
        yield f"changed the working directory to {now['directory']}; use absolute paths"
    if names := [name for name in _changed_variables(before, now) if not name.startswith(tuple(allowed))]:
        yield (
            f"changed the environment variables {', '.join(names)}, which the run's processes inherit; give "
            "settings to the library itself, or name the library's prefix in `own_variables` of the test class"
        )
    if now["disabled"] != before["disabled"]:
        yield "called logging.disable, which silences the run; set the level of its own logger"
    if now["level"] != before["level"]:
        level = logging.getLevelName(now["level"])
        yield f"set the level of the root logger to {level}; set the level of its own logger"


def _changed_variables(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    one, other = before["environment"], now["environment"]
    return sorted(name for name in {*one, *other} if one.get(name) != other.get(name))


def main(order: Mapping[str, Any], answer: Path) -> None:
    """Follow a run to its end and tell what is left."""
    run = RunInfo(**{**order["run"], "directory": Path(order["run"]["directory"])})
    session = HookSession(order["plugin"], order["options"], run, timeout_s=order["timeout_s"])
    session.tell(ordinary())
    session.close()
    # Python waits for these at its end.
    threads = [each.name for each in threading.enumerate() if not each.daemon and each is not threading.main_thread()]
    end = time.monotonic() + _GONE_S
    while (children := psutil.Process().children(recursive=True)) and time.monotonic() < end:
        psutil.wait_procs(children, timeout=0.1)
    processes = [" ".join(child.cmdline()) or f"process {child.pid}" for child in children]
    answer.write_text(json.dumps({"threads": threads, "processes": processes}))
    timer = threading.Timer(order["timeout_s"], os._exit, (LATE,))
    timer.daemon = True
    timer.start()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), Path(sys.argv[2]))
