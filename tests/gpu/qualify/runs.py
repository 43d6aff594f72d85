"""Stage E: runs of `cosmos run`, side by side as many as the machine has cores for, all on one GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, Final

from tests.gpu.qualify.checks import ROOT
from tests.gpu.qualify.where import Where

CORES: Final = 4
"""Of a run: a controller, a replica of each kind, and workers."""


def all_runs(where: Where, name: str, *, runs: Mapping[str, Mapping[str, Any]]) -> None:
    """Run recipes.

    Args:
        where: It runs.
        name: Of the check.
        runs: By name: `recipe`, `measure` of the summary and `least` or `most` it may be, `options` of `cosmos run`,
            and more options that make it `tiny`.
    """
    together = max(1, (os.cpu_count() or 1) // CORES)
    with ThreadPoolExecutor(together) as threads:
        started = {threads.submit(_run, where, run, settings): run for run, settings in runs.items()}
        for done in as_completed(started):
            run = started[done]
            try:
                summary = done.result()
            except RuntimeError as error:
                where.failed(f"{name}: {run}", str(error))
                continue
            told = runs[run]
            where.right(f"{name}: {run}, steps", summary["steps"], least=summary["planned_steps"])
            value, bounds = float(summary[told["measure"]]), {key: told.get(key) for key in ("least", "most")}
            where.speed(f"{name}: {run}, {told['measure'].replace('_', ' ')}", value, **bounds)
            where.speed(f"{name}: {run}, whole run", summary["wall_s"], "s")


def _run(where: Where, run: str, settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """The summary of a run; raises a `RuntimeError` that says what it printed last."""
    options: Sequence[str] = [*settings.get("options", ()), *(settings["tiny"] if where.is_tiny else ())]
    for role in ("policy", "rollout"):
        options = [*options, "--set", f"{role}.device={where.device}"]
    command = [sys.executable, "-m", "cosmos_core.cli", "run", str(ROOT / "recipes" / settings["recipe"]), *options]
    place = f"run.output_dir={json.dumps(str(where.folder))}"
    done = subprocess.run(
        [*command, "--name", run, "--set", place, "--set", "tracking.hooks=[]"],
        capture_output=True,
        text=True,
        check=False,
    )
    print(f"$ {' '.join(command)}\n{done.stdout}{done.stderr}", file=sys.stderr, flush=True)
    if done.returncode:
        said = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        raise RuntimeError(f"exit code {done.returncode}: {said[-1] if said else 'it said nothing'}")
    summary: Mapping[str, Any] = json.loads(Path(where.folder, run, "summary.json").read_text())
    if summary["outcome"] != "finished":
        raise RuntimeError(f"outcome {summary['outcome']!r}")
    return summary
