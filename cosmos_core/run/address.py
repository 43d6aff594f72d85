"""The address of a run's controller, which it announces in the run's folder; it is there while it lives or answers."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, Final

import attrs
import psutil

from cosmos_core.config.job import Job
from cosmos_core.errors import ConfigError, TransportError
from cosmos_core.run.observer import Observer
from cosmos_core.transport.addresses import host_id
from cosmos_core.transport.keys import person_key


def address_file(job: Job) -> Path:
    """The file to which the controller writes its address."""
    return job.directory / "controller.json"


@attrs.frozen(kw_only=True)
class Announced:
    """The announcement of the controller that came last.

    Attributes:
        address: Where it listens.
        host: The machine of that process (`replica.host.host_id`).
    """

    address: str
    pid: int
    host: str

    @property
    def machine(self) -> str:
        """Name of its machine, for people."""
        return self.host.partition("/")[0]

    @property
    def is_elsewhere(self) -> bool:
        """True if its process is of another machine, so that only its answer shows whether it is there."""
        return self.machine != host_id().partition("/")[0]

    @property
    def is_gone(self) -> bool:
        """True if its process is known to have ended; of another machine's, nothing is known."""
        return not self.is_elsewhere and (self.host != host_id() or not psutil.pid_exists(self.pid))


def announced(job: Job) -> Announced | None:
    """The announcement in a run's folder; its controller may be gone. None if there is none."""
    try:
        found: dict[str, Any] = json.loads(address_file(job).read_text(encoding="utf-8"))
        return Announced(address=str(found["address"]), pid=int(found["pid"]), host=str(found["host"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def read_address(job: Job) -> str | None:
    """Address of the controller that serves this run now; None while there is none, or if it is known to be gone.

    Of a controller on another machine this is what it wrote, even if it is gone: see `find_address`.
    """
    found = announced(job)
    return None if found is None or found.is_gone else found.address


def page_words(job: Job) -> list[str]:
    """The address of the run's web page, for people, or why there is none although asked for; else nothing."""
    try:
        found: dict[str, Any] = json.loads(address_file(job).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return []
    if "page" in found:
        return [f"live page: {found['page']} (to change things there: the token in {found['page_token']})"]
    return [f"no live page: {found['page_problem']}"] if "page_problem" in found else []


_ANSWER_S: Final = 5.0
_POLL_S: Final = 0.1


def find_address(job: Job) -> str | None:
    """Address of the controller that serves a run now; None if there is none, or none that answers here.

    One on this machine is there while its process is. One on another machine is asked, which takes a few seconds if it
    does not answer. A TransportError if it refuses whoever asks.
    """
    found = announced(job)
    if found is None or found.is_gone or (found.is_elsewhere and not _answers(found.address, job)):
        return None
    return found.address


def absence(job: Job) -> str:
    """The reason why `find_address` found no controller, for people."""
    found = announced(job)
    if found is None or not found.is_elsewhere:
        return "its controller is gone"
    return (
        f"its controller on {found.machine} does not answer at {found.address} within {_ANSWER_S:g} s: it is gone, or "
        "cannot be reached from here"
    )


def require_gone(job: Job) -> None:
    """Refuse, by a ConfigError, a run whose controller is there, though no session of this machine has it."""
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
    deadline = time.monotonic() + _ANSWER_S
    with Observer(address, job.run_id, person_key(job.keys)) as observer:
        while observer.silence_s > _ANSWER_S and time.monotonic() < deadline:
            observer.poll(_POLL_S)
        return observer.silence_s <= _ANSWER_S
