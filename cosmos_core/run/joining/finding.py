"""Which run a replica joins, and whether it can."""

from __future__ import annotations

import re
import secrets
import socket
from pathlib import Path
from typing import Final

import attrs

from cosmos_core.config.job import Job
from cosmos_core.config.loading import load_job
from cosmos_core.errors import ConfigError, CosmosError
from cosmos_core.plugins.choice import choose
from cosmos_core.plugins.discovery import discover
from cosmos_core.plugins.roles import selections
from cosmos_core.run.asking import RUNS
from cosmos_core.run.files.announcement import announced
from cosmos_core.run.files.provenance import joined_with
from cosmos_core.transport.messages import Role

_NAME: Final = re.compile(r"[A-Za-z0-9_-]+")
_STRANGE: Final = re.compile(r"[^A-Za-z0-9]+")


@attrs.frozen(kw_only=True)
class Joining:
    """What joins which run.

    Attributes:
        job: The run.
        address: Of its controller.
        role: What the replica will do.
        name: Its name.
        checkpoint: Where a policy replica starts from; None for the weights of the others.
    """

    job: Job
    address: str
    role: Role
    name: str
    checkpoint: str | None = None


def find_run(controller: str | None, run: Path | None, runs: Path = RUNS) -> tuple[Path, str]:
    """The folder of a run and the address of its controller, of which one may be left out.

    Args:
        controller: `tcp://HOST:PORT`; None for the address that the run's folder tells.
        run: The run's folder; None for the one in `runs` whose controller listens at that address.
        runs: Folder of runs.

    Raises:
        ConfigError: What is given does not tell the other.
    """
    if run is not None:
        told = _told_address(run)
        if not told and controller is None:
            raise ConfigError(f"{run}: no controller has listened for this run yet; start it with `cosmos run`")
        return run, controller or told
    if controller is None:
        raise ConfigError("give --controller ADDR, as in RUN/controller.json, or --run RUN")
    found, unreadable = [], []
    for directory in (path.parent for path in sorted(runs.glob("*/controller.json"))):
        try:
            if _told_address(directory) == controller:
                found.append(directory)
        except CosmosError as error:
            unreadable.append(f"{directory} ({error})")
    if len(found) != 1:
        passed_over = f"; passed over: {', '.join(unreadable)}" if unreadable else ""
        raise ConfigError(
            f"--controller {controller}: {'no run' if not found else 'more than one run'} in {runs}/ has that address; "
            f"name the run's folder, as this machine sees it, with --run RUN{passed_over}"
        )
    return found[0], controller


def prepare(role: Role, folder: Path, address: str, *, name: str | None, checkpoint: str | None) -> Joining:
    """Find out whether a replica can join.

    Args:
        role: What it will do.
        folder: The run's folder.
        address: Of the controller.
        name: The replica's name; None for one that nobody has.
        checkpoint: Where a policy replica starts from.

    Raises:
        CosmosError: It cannot; the message says why, and what to do.
    """
    job = load_job(folder)
    if role == "rollout" and not job.uses_rollouts:
        raise ConfigError(f"{folder}: the run learns from demonstrations only; it has no use for a rollout replica")
    if role == "rollout" and checkpoint is not None:
        raise ConfigError("--checkpoint is for policy replicas; a rollout replica gets its weights from them")
    installed = discover()
    records = [choose(kind, plugin, installed) for kind, plugin in selections(job.recipe)]
    if differences := joined_with(folder, records):
        raise ConfigError(
            f"{folder}: this machine has other code than the run: {'; '.join(differences)}. Install the same, or let "
            "the run go on with this: cosmos run --resume"
        )
    if name is None:
        host = _STRANGE.sub("-", socket.gethostname().partition(".")[0]).strip("-") or "host"
        name = f"{role}-{host}-{secrets.token_hex(2)}"
    if not _NAME.fullmatch(name) or not name.startswith(f"{role}-"):
        raise ConfigError(f"--name {name}: a {role} replica is called {role}-…, of letters, digits, '_' and '-'")
    return Joining(job=job, address=address, role=role, name=name, checkpoint=checkpoint)


def _told_address(run: Path) -> str:
    """The address that a run's controller wrote last; empty if there is none.

    Raises:
        ConfigError: The folder is no run's.
    """
    found = announced(load_job(run))
    return "" if found is None else found.address
