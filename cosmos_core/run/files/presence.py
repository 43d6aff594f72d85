"""Whether a run has a controller now: by its process on this machine, by its answer on another."""

from __future__ import annotations

import time
from typing import Final

from cosmos_core.config.job import Job
from cosmos_core.errors import ConfigError, TransportError
from cosmos_core.run.files.announcement import address_file, announced
from cosmos_core.run.following.observer import Observer
from cosmos_core.transport.keys import person_key

_ANSWER_S: Final = 5.0
_POLL_S: Final = 0.1


def find_address(job: Job) -> str | None:
    """Address of the controller that serves a run now; None if there is none, or none that answers here.

    One on this machine is there while its process is. One on another machine is asked, which takes a few seconds if
    it does not answer.

    Raises:
        TransportError: It refuses whoever asks.
    """
    found = announced(job)
    if found is None or found.is_gone or (found.is_elsewhere and not _answers(found.address, job)):
        return None
    return found.address


def absence(job: Job) -> str:
    """Why `find_address` found no controller, for people."""
    found = announced(job)
    if found is None or not found.is_elsewhere:
        return "its controller is gone"
    return (
        f"its controller on {found.machine} does not answer at {found.address} within {_ANSWER_S:g} s: it is gone, or "
        "cannot be reached from here"
    )


def require_gone(job: Job) -> None:
    """Refuse a run whose controller is there, though no session of this machine has it.

    Raises:
        ConfigError: It is there, or something that is not this run's listens where it was.
    """
    try:
        address = find_address(job)
    except TransportError as error:
        raise ConfigError(
            f"{job.directory}: whether the run goes on cannot be told: {error}. If no process of it is left, remove "
            f"{address_file(job)}"
        ) from error
    if address is not None:
        raise ConfigError(f"{job.directory} is running now (its controller listens at {address}); stop it first")


def _answers(address: str, job: Job) -> bool:
    observer = Observer(address, job.run_id, person_key(job.keys))
    deadline = time.monotonic() + _ANSWER_S
    try:
        while observer.silence_s > _ANSWER_S and time.monotonic() < deadline:
            observer.poll(_POLL_S)
        return observer.silence_s <= _ANSWER_S
    finally:
        observer.close()
