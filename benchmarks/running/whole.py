"""Whole runs of `cosmos run`, one after the other, and the CPU seconds of all their processes."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs


@attrs.frozen(kw_only=True)
class Whole:
    """One run: its `summary.json`, the seconds that the command took, and the CPU seconds of its processes."""

    summary: Mapping[str, Any]
    seconds: float
    cpu_s: float


def run_whole(folder: Path, name: str, *arguments: str) -> Whole:
    """Run a recipe, as `<folder>/<name>`; what fails ends the benchmark, with what it printed.

    Args:
        folder: Of the runs; `adopt_orphans` was called before.
        name: Of the run.
        arguments: Of `cosmos run`.
    """
    before, began = _children_cpu_s(), time.perf_counter()
    place = f"run.output_dir={json.dumps(str(folder))}"
    command("run", *arguments, "--name", name, "--set", place, "--set", "tracking.hooks=[]")
    seconds = time.perf_counter() - began
    summary = json.loads((folder / name / "summary.json").read_text())
    return Whole(summary=summary, seconds=seconds, cpu_s=_children_cpu_s() - before)


def command(*arguments: str) -> None:
    """Run a `cosmos` command; one that fails ends the benchmark, with what it printed."""
    line = [sys.executable, "-m", "cosmos_core.cli", *arguments]
    done = subprocess.run(line, check=False, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"cosmos {' '.join(arguments)} failed:\n{done.stdout}{done.stderr}")


def adopt_orphans() -> None:
    """Make processes whose parents end children of this one, so that their CPU seconds are known (Linux)."""
    set_child_subreaper = 36
    if ctypes.CDLL(None, use_errno=True).prctl(set_child_subreaper, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def _children_cpu_s() -> float:
    """CPU seconds of all processes that were started from here, theirs included; waits until they have ended."""
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
