"""Tells a hook of a made-up run as `cosmos run` does: `python -m cosmos_core.testing.conformance.story ORDER ANSWER`.

The process writes to the file ANSWER what is left when the run is over, and must then be able to end.
"""

from __future__ import annotations

import functools
import json
import logging
import math
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
        metrics = {"train/loss": 1.0 / step, "train/lr": 1e-3, "reward/mean": 0.5, "batch/samples": 8}
        yield Call("step_finished", {"step": step, "metrics": metrics})
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


def ordinary() -> list[Call]:
    """A whole run."""
    return [*beginning(), *steps(1, 3), *ending()]


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
        """Those of this process."""
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
    main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), Path(sys.argv[2]))
