"""A rendezvous file in the run's folder, by which the processes of a replica find their leader.

A file that cannot be written or read, or does not come in time, is a `ReplicaError`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import attrs
import msgspec

from cosmos_core.errors import ReplicaError


@attrs.frozen(kw_only=True)
class Rendezvous:
    """The addresses at which a leader waits for its followers.

    A file of an earlier session is ignored. The token is what followers say to its health channel: a secret, as the
    file is.
    """

    session: str
    token: str = attrs.field(repr=False)
    host: str
    health_port: int
    store: int


def rendezvous_file(run: Path, replica: str) -> Path:
    """The file to which the leader of a replica writes its `Rendezvous`."""
    return run / "replicas" / f"{replica}.json"


def announce(path: Path, rendezvous: Rendezvous) -> None:
    """Write the file, for its owner's eyes alone, whole or not at all."""
    partial = path.with_name(f".{path.name}@{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.unlink(missing_ok=True)
        with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(msgspec.json.encode(rendezvous))
        partial.replace(path)
    except OSError as error:
        raise ReplicaError(f"{path} cannot be written, where followers look for their leader: {error}") from error


def find(path: Path, session: str, timeout_s: float, interrupted: Callable[[], bool]) -> Rendezvous:
    """Wait for the file of this start of the run."""
    deadline = time.monotonic() + timeout_s
    state = "there is none"
    while not interrupted():
        try:
            found = msgspec.json.decode(path.read_bytes(), type=Rendezvous)
        except FileNotFoundError:
            state = "there is none"
        except (OSError, msgspec.DecodeError) as error:
            raise ReplicaError(f"{path}: cannot be read: {error}") from error
        else:
            if found.session == session:
                return found
            state = "the one that is there is of an earlier start"
        if time.monotonic() > deadline:
            raise ReplicaError(
                f"{path}: the leader has not written it within {timeout_s:g} s ({state}); see "
                f"logs/{path.stem}.log for why it did not start"
            )
        time.sleep(0.02)
    raise ReplicaError(f"{path}: told to stop while the leader was awaited")
