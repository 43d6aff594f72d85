"""Runs in a folder, found by what is known of them: that one goes on, or its controller's address."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

from cosmos_core.config.loading import load_job
from cosmos_core.errors import ConfigError, CosmosError, ReplicaError
from cosmos_core.run import folder
from cosmos_core.run.address import announced, find_address

RUNS: Final = Path("runs")


def only_run(runs: Path = RUNS) -> Path:
    """The folder of the one run that goes on in a folder."""
    # A summary is written when a session ends, and removed when another begins.
    found, passed_over = _found(
        runs, lambda run: not (run / folder.SUMMARY).exists() and find_address(load_job(run)) is not None
    )
    if len(found) == 1:
        return found[0]
    if not found:
        raise ReplicaError(f"no run goes on in {runs}/; name its folder with --run RUN{passed_over}")
    raise ReplicaError(f"several runs go on ({', '.join(map(str, found))}); name one with --run RUN{passed_over}")


def run_at(controller: str, runs: Path = RUNS) -> Path:
    """The folder of the one run in a folder whose controller listens at an address."""
    found, passed_over = _found(runs, lambda run: told_address(run) == controller)
    if len(found) == 1:
        return found[0]
    raise ConfigError(
        f"--controller {controller}: {'no run' if not found else 'more than one run'} in {runs}/ has that address; "
        f"name the run's folder, as this machine sees it, with --run RUN{passed_over}"
    )


def told_address(run: Path) -> str:
    """The address that a run's controller wrote last; empty if there is none."""
    found = announced(load_job(run))
    return "" if found is None else found.address


def _found(runs: Path, is_wanted: Callable[[Path], bool]) -> tuple[list[Path], str]:
    """Runs that are wanted, and in words those that cannot be read."""
    found, unreadable = [], []
    for run in (each.parent for each in sorted(runs.glob("*/job.json"))):
        try:
            found += [run] if is_wanted(run) else []
        except CosmosError as error:
            unreadable.append(f"{run} ({error})")
    return found, f"; passed over: {', '.join(unreadable)}" if unreadable else ""
