"""Runs a stage in a process of its own, within its time; what crashes or hangs costs one check."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import attrs

from tests.gpu.qualify.checks import BENCHMARKS, CHECKS, ROOT, Check
from tests.gpu.qualify.report import Figure, Report, Verdict
from tests.gpu.qualify.where import Where

TINY_S: Final = 5.0
"""What a check is taken to need with tiny shapes."""
_SLACK, _LEAST_S = 3.0, 240.0
"""A check hangs after so many times what it should need, and is not ended before so many seconds."""
_TINY_SLOW_S: Final = 300.0
"""A check with tiny shapes is not ended, but hangs if it has had so long when time is up."""
_END_S: Final = 20.0
"""What runs that are asked to end may take."""
_BROKEN: Final = "CUDA error"
"""Part of what is raised once a device no longer answers to a process."""


@attrs.frozen(kw_only=True)
class Budget:
    """Time for stages.

    Attributes:
        until: When all has to be done, of `time.monotonic`.
        stage_s: Seconds for a stage.
        left_out: The checks that do not fit, and why not, by stage and name.
    """

    until: float
    stage_s: float
    left_out: Mapping[tuple[str, str], str]

    @classmethod
    def of(
        cls, checks: Mapping[str, Sequence[Check]], *, minutes: float | None, stage_s: float, is_tiny: bool
    ) -> Budget:
        """Choose what fits, the most valuable first; of those alike the earlier."""
        left = 60 * minutes if minutes else float("inf")
        until, left_out = time.monotonic() + left, {}
        every = [(stage, check) for stage, mine in checks.items() for check in mine]
        for stage, check in sorted(every, key=lambda each: each[1].value):
            needed = TINY_S if is_tiny else check.seconds
            if needed > left:
                left_out[stage, check.name] = f"it takes about {needed:.0f} s, and --minutes {minutes:g} leaves less"
            else:
                left -= needed
        return cls(until=until, stage_s=stage_s, left_out=left_out)


class _Process:
    """A process that runs checks; what it tells is read from its standard output."""

    def __init__(self, asked: Mapping[str, Any], log: Path) -> None:
        self._log = log
        paths = [str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), str(BENCHMARKS)]
        with log.open("a") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.gpu.qualify", "--work", json.dumps(asked)],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                # Those that it starts end with it.
                start_new_session=True,
            )
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self._lines.put(line)
        self._lines.put("")

    def told(self, deadline: float) -> dict[str, Any] | None:
        """The next thing that it tells, None once it has ended; raises `queue.Empty` at the deadline."""
        line = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
        return json.loads(line) if line else None

    def end(self) -> int:
        """End it and what it has started, if these have not ended; its exit code."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            # One that has told all is about to.
            self._process.wait(timeout=0 if self._lines.empty() else 5)
        # A run ends its own processes if it is asked to, wherever they are.
        for number in (signal.SIGTERM, signal.SIGKILL):
            until = time.monotonic() + _END_S
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
                while time.monotonic() < until:
                    # One that has ended is in its group until it is waited for.
                    self._process.poll()
                    os.killpg(self._process.pid, 0)
                    time.sleep(0.05)
        return self._process.wait()

    def last_words(self) -> str:
        """The last line of its log."""
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"


def run_stage(
    stage: str, checks: Sequence[Check], *, device: str, is_tiny: bool, report: Report, budget: Budget, log: Path
) -> None:
    """Run checks, in a process that is started again if one of them ends it."""
    began = time.monotonic()
    deadline = min(began + budget.stage_s, budget.until)
    cut_off: Verdict = "failed" if deadline < budget.until else "skipped"
    late = "the stage's time was up" if deadline < budget.until else "the time of --minutes was up"
    names = [check.name for check in checks]
    with tempfile.TemporaryDirectory(prefix=f"cosmos-gpu-{stage}-") as folder:
        while names and time.monotonic() < deadline:
            until = time.time() + deadline - time.monotonic()
            asked = {
                "stage": stage,
                "checks": names,
                "device": device,
                "tiny": is_tiny,
                "folder": folder,
                "until": until,
            }
            slow = {check.name: _TINY_SLOW_S if is_tiny else _SLACK * check.seconds for check in checks}
            names = _round(asked, slow, (deadline, late, cut_off), lambda figure: report.add(stage, figure), log)
    for name in names:
        report.add(stage, Figure(name=name, verdict="skipped", note=late))
    report.seconds[stage] = time.monotonic() - began
    report.write()


def _round(
    asked: Mapping[str, Any],
    slow: Mapping[str, float],
    end: tuple[float, str, Verdict],
    tell: Callable[[Figure], None],
    log: Path,
) -> list[str]:
    """Run checks until their process has ended; the names of those that are left.

    `slow` is after how many seconds each hangs; `end` the time at which all of them end, what is said then, and the
    verdict on a check that does not hang then.
    """
    deadline, late, cut_off = end
    names: list[str] = asked["checks"]
    left, begun, reason, until, since = list(names), "", "", deadline, time.monotonic()
    verdict: Verdict = "failed"
    process = _Process(asked, log)
    try:
        while (told := process.told(until)) is not None:
            if "figure" in told:
                tell(Figure(**told["figure"]))
            elif "begun" in told:
                begun, since = told["begun"], time.monotonic()
                until = deadline if asked["tiny"] else min(deadline, since + max(_LEAST_S, slow[begun]))
            else:
                left.remove(begun)
                begun, until = "", deadline
    except queue.Empty:
        took = time.monotonic() - since
        reason = f"not done in {took:.0f} s" if begun else f"no check began in {took:.0f} s"
        if until == deadline and took <= slow.get(begun, _LEAST_S):
            reason, verdict = f"{late} while it ran" if begun else late, cut_off
    finally:
        code = process.end()
    if code == 0 and not reason:
        return []
    if begun or left == names:
        # Of a process that did not even begin, another would be no better.
        lost = [begun] if begun else left
        for name in lost:
            tell(Figure(name=name, verdict=verdict, note=reason or f"exit code {code}: {process.last_words()}"))
        left = [name for name in left if name not in lost]
    return left


def work(asked: Mapping[str, Any]) -> int:
    """Run checks in this process, and tell of them on standard output."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    # Libraries that print do so into the log.
    os.dup2(2, 1)

    def say(**told: Any) -> None:
        print(json.dumps(told), file=answers)

    where = Where(
        device=asked["device"],
        is_tiny=asked["tiny"],
        folder=Path(asked["folder"]),
        tell=lambda figure: say(figure=attrs.asdict(figure)),
    )
    for check in CHECKS[asked["stage"]]:
        if check.name not in asked["checks"]:
            continue
        say(begun=check.name)
        left, problem = asked["until"] - time.time(), ""
        if not where.is_tiny and left < check.seconds:
            where.skipped(check.name, f"it takes about {check.seconds:.0f} s, and the stage has {left:.0f} s left")
        else:
            try:
                check.measure(where)
            except Exception as error:  # noqa: BLE001 - the supervised boundary of a check
                traceback.print_exc()
                problem = next(iter(str(error).strip().splitlines()), "")
                where.failed(check.name, f"{type(error).__name__}: {problem}")
        say(done=check.name)
        if _BROKEN in problem:
            return 3
        gc.collect()
        if where.device == "cuda" and "torch" in sys.modules:
            sys.modules["torch"].cuda.empty_cache()
    return 0
