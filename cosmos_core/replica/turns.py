"""Turns of a process on a GPU that policy and rollout replicas share, and the lock that keeps them apart."""

from __future__ import annotations

import contextlib
import fcntl
import platform
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from cosmos_core.errors import ReplicaError
from cosmos_core.replica.process import RoleArgs
from cosmos_core.transport.messages import Role
from cosmos_core.transport.sockets import Closing

_POLL_S: Final = 0.05
_PATIENCE_S: Final = 300.0
"""How long the other pool may be awake after its turn: who is given up is ended long before."""


class RoleLock(Closing):
    """A lock of the processes of one role on this machine, of a run: many of one role hold it, never of both.

    The kernel lets go of it when its process ends. So a process that starts, or was given up and lives, is kept apart
    from those of the other role, whatever the controller knows of it.
    """

    def __init__(self, folder: Path, role: Role) -> None:
        """Open its files, in a folder of the run that all its machines may share; nothing is held."""
        folder.mkdir(parents=True, exist_ok=True)
        # NFS grants a shared lock to those that opened a file for reading, the other kind to those that write.
        files = {each: (folder / f"{each}@{platform.node()}.lock").open("a+b") for each in ("policy", "rollout")}
        self._own: Final = files.pop(role)
        self._other: Final = files.popitem()[1]

    def acquire(self, interrupted: Callable[[], bool]) -> None:
        """Wait until no process of the other role holds it, and hold it.

        Raises:
            ReplicaError: One did for too long, or waiting was interrupted.
        """
        end = time.monotonic() + _PATIENCE_S
        while not self._enter():
            if interrupted() or time.monotonic() > end:
                raise ReplicaError(
                    "the other pool has not gone to sleep (rollout.placement = 'colocated') until this process was to "
                    f"end, or for {_PATIENCE_S:g} s; `fuser {self._other.name}` tells its process ids"
                )
            # Both may have tried at once.
            time.sleep(random.uniform(_POLL_S, 2 * _POLL_S))  # noqa: S311 - no secret

    def release(self) -> None:
        """Hold it no more."""
        fcntl.flock(self._own, fcntl.LOCK_UN)

    def close(self) -> None:
        """Let go of it, and of its files. Idempotent."""
        self._own.close()
        self._other.close()

    def _enter(self) -> bool:
        try:
            fcntl.flock(self._own, fcntl.LOCK_SH | fcntl.LOCK_NB)
            fcntl.flock(self._other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.release()
            return False
        fcntl.flock(self._other, fcntl.LOCK_UN)
        return True


@contextlib.contextmanager
def role_lock(args: RoleArgs) -> Iterator[RoleLock | None]:
    """The lock of a process that is about to take a GPU's memory, held; None where its run's pools share no GPUs."""
    if not args.job.takes_turns:
        yield None
        return
    with RoleLock(args.job.directory / "replicas", args.role) as lock:
        lock.acquire(args.stop.is_set)
        yield lock


class Turns:
    """Keeps a process to its turns; it has made what takes memory, and goes to sleep. One thread calls its methods.

    Args:
        lock: Of its role, held.
        sleep: Gives its memory up.
        wake: Takes it again.
        interrupted: Whether the process shall end.

    Attributes:
        is_asleep: Whether it sleeps.
    """

    def __init__(
        self,
        lock: RoleLock,
        *,
        sleep: Callable[[], None],
        wake: Callable[[], None],
        interrupted: Callable[[], bool],
    ) -> None:
        self._lock: Final = lock
        self._sleep: Final = sleep
        self._wake: Final = wake
        self._interrupted: Final = interrupted
        self._turn = -1
        self._since = 0.0
        self._spent: Final = {"asleep_s": 0.0, "to_sleep_s": 0.0, "to_wake_s": 0.0}
        self.is_asleep = False
        self._rest()

    def follow(self, turn: int, *, sleep: bool) -> bool:
        """Do as a directive says; whether it is to be told that this process sleeps in that turn."""
        if not sleep:
            self._rise()
            return False
        self._rest()
        was_told, self._turn = turn == self._turn, turn
        return not was_told

    def _rest(self) -> None:
        if self.is_asleep:
            return
        began = time.monotonic()
        self._sleep()
        self._lock.release()
        self.is_asleep, self._since = True, time.monotonic()
        self._spent["to_sleep_s"] += self._since - began

    def _rise(self) -> None:
        if not self.is_asleep:
            return
        began = time.monotonic()
        self._lock.acquire(self._interrupted)
        self._wake()
        self.is_asleep = False
        self._spent["asleep_s"] += began - self._since
        self._spent["to_wake_s"] += time.monotonic() - began

    def gauges(self) -> dict[str, float]:
        """Seconds asleep since the start, and spent on going to sleep and on waking."""
        asleep_s = time.monotonic() - self._since if self.is_asleep else 0.0
        return {**self._spent, "asleep_s": self._spent["asleep_s"] + asleep_s}
