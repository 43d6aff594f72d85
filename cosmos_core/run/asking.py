"""Asking a run that goes on for something, and hearing whether it was taken in."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from cosmos_core.config.job import Job
from cosmos_core.config.loading import load_job
from cosmos_core.errors import CosmosError, ReplicaError
from cosmos_core.run.conversation import Conversation
from cosmos_core.run.files import folder as run_folder
from cosmos_core.run.files.presence import absence, find_address
from cosmos_core.transport.keys import person_key
from cosmos_core.transport.requests import Request

RUNS: Final = Path("runs")


def only_run(folder: Path = RUNS) -> Path:
    """The folder of the one run that goes on in `folder`; runs that cannot be read are passed over.

    Raises:
        ReplicaError: There is none, or several.
    """
    found, unreadable = [], []
    for directory in (each.parent for each in sorted(folder.glob("*/job.json"))):
        try:
            # A summary is written when a session ends, and removed when another begins.
            if not (directory / run_folder.SUMMARY).exists() and find_address(load_job(directory)) is not None:
                found.append(directory)
        except CosmosError as error:
            unreadable.append(f"{directory} ({error})")
    if len(found) == 1:
        return found[0]
    passed_over = f"; passed over: {', '.join(unreadable)}" if unreadable else ""
    if not found:
        raise ReplicaError(f"no run goes on in {folder}/; name its folder with --run RUN{passed_over}")
    raise ReplicaError(f"several runs go on ({', '.join(map(str, found))}); name one with --run RUN{passed_over}")


def address_of(directory: Path, job: Job) -> str:
    """Where the controller of a run listens.

    Raises:
        ReplicaError: The run does not go on.
    """
    address = find_address(job)
    if address is None:
        raise ReplicaError(f"{directory}: the run does not go on ({absence(job)}), so that nothing can be asked")
    return address


def ask(directory: Path, request: Request) -> None:
    """Ask a run, and return once the request is in its journal.

    Raises:
        CosmosError: It is no run.
        ReplicaError: It does not go on, does not answer, or refuses; the message says why.
    """
    with conversation(directory, load_job(directory)) as controller:
        refusal = controller.ask(request)
    if refusal:
        raise ReplicaError(f"{directory}: refused: {refusal}")


def conversation(directory: Path, job: Job) -> Conversation:
    """A connection to the controller of a run, for who may ask it for something.

    Raises:
        ConfigError: There is no key in its folder with which this user may.
        ReplicaError: The run does not go on.
    """
    return Conversation(address_of(directory, job), job.run_id, person_key(job.keys, may_ask=True))
