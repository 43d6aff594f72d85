"""What a controller writes of itself into the folder of its run: where it listens, and on which machine it is."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import attrs

from cosmos_core.config.job import Job
from cosmos_core.replica.host import host_id


def address_file(job: Job) -> Path:
    """Where the controller writes its address."""
    return job.directory / "controller.json"


@attrs.frozen(kw_only=True)
class Announced:
    """What the controller that came last wrote of itself.

    Attributes:
        address: Where it listens.
        pid: Its process.
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
        """Whether its process is of another machine, so that only its answer shows whether it is there."""
        return self.machine != host_id().partition("/")[0]

    @property
    def is_gone(self) -> bool:
        """Whether its process is known to have ended; of another machine's, nothing is known."""
        return not self.is_elsewhere and (self.host != host_id() or not _is_alive(self.pid))


def announced(job: Job) -> Announced | None:
    """What the run's folder tells of its controller, which may be gone; None if it tells of none."""
    try:
        found: dict[str, Any] = json.loads(address_file(job).read_text(encoding="utf-8"))
        return Announced(address=str(found["address"]), pid=int(found["pid"]), host=str(found["host"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def read_address(job: Job) -> str | None:
    """Address of the controller that serves this run now; None while there is none, or if it is known to be gone.

    Of a controller on another machine this is what it wrote, even if it is gone: see `presence.find_address`.
    """
    found = announced(job)
    return None if found is None or found.is_gone else found.address


def page_words(job: Job) -> list[str]:
    """Where the run's web page is, for people; why there is none if that was not asked for; else nothing."""
    try:
        found: dict[str, Any] = json.loads(address_file(job).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return []
    if "page" in found:
        return [f"live page: {found['page']} (to change things there: the token in {found['page_token']})"]
    return [f"no live page: {found['page_problem']}"] if "page_problem" in found else []


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
