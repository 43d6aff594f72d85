"""Turns of a process on a GPU that policy and rollout replicas share, and the lock that keeps them apart."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import math
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from cosmos_core.errors import ConfigError, ProcessLostError
from cosmos_core.replica.process import RoleArgs
from cosmos_core.scratch import shared_scratch
from cosmos_core.transport.messages import Role
from cosmos_core.transport.sockets import Closing
from cosmos_core.weights.shared_memory import directories_for_files

_LOG: Final = logging.getLogger(__name__)

_POLL_S: Final = 0.05
_TELL_S: Final = 30.0


class RoleLock(Closing):
    """A lock of the processes of one role on this machine, of a run: many of one role hold it, never of both.

    Each process has a file, of its name in the folder of its role, and locks it for as long as it holds the lock. The
    kernel lets go of it when the process ends. So one that starts, or was given up and lives, is kept apart from those
    of the other role, whatever the controller knows of it.

    Args:
        folder: On this machine, of the run.
        role: The process's.
        name: The process's.
        interrupted: Whether it shall end.
        agree: Whether something is true of all processes of its replica, which call it at the same time.

    Attributes:
        patience_s: How long it is waited for.
    """

    def __init__(
        self,
        folder: Path,
        role: Role,
        name: str,
        *,
        interrupted: Callable[[], bool] = lambda: False,
        agree: Callable[[bool], bool] = bool,
    ) -> None:
        self._others: Final = folder / ("rollout" if role == "policy" else "policy")
        for each in (folder / role, self._others):
            each.mkdir(mode=0o700, exist_ok=True)
        self._name: Final = name
        self._own: Final = (folder / role / name).open("ab")
        self._interrupted: Final = interrupted
        self._agree: Final = agree
        self.patience_s = math.inf

    def acquire(self) -> None:
        """Wait until no process of the other role holds it, and hold it.

        Processes of one replica hold it together or not at all. One that held it alone would stop the other pool on its
        machine, and its next process may wait on another machine for what that pool is to do first.

        Raises:
            ProcessLostError: It was waited for too long, or this process shall end.
        """
        began = told = time.monotonic()
        while not self._agree(not (awake := self._enter())):
            self.release()
            now, names = time.monotonic(), ", ".join(awake) or "others of this replica, on other machines"
            if self._interrupted() or now - began > self.patience_s:
                raise ProcessLostError(
                    f"waited {now - began:.0f} s for the GPUs that this process shares (rollout.placement = "
                    f"'colocated'), until it was to end or for too long; not asleep: {names}; see their logs"
                )
            if now - told > _TELL_S:
                told = now
                _LOG.info("waiting for shared GPUs, %.0f s so far; not asleep: %s", now - began, names)
            # Others may have tried at once.
            time.sleep(random.uniform(_POLL_S, 2 * _POLL_S))  # noqa: S311 - no secret

    def release(self) -> None:
        """Hold it no more."""
        fcntl.flock(self._own, fcntl.LOCK_UN)

    def close(self) -> None:
        """Let go of it, and of its file. Idempotent."""
        self._own.close()

    def _enter(self) -> list[str]:
        """Hold it unless processes of the other role do, or an earlier one of this name; the names of these."""
        if awake := self._awake():
            return awake
        try:
            fcntl.flock(self._own, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return [self._name]
        # Again, now that it is locked: of two that do this at once, one at least sees the other.
        return self._awake()

    def _awake(self) -> list[str]:
        return [path.name for path in sorted(self._others.iterdir()) if is_locked(path)]


def is_locked(path: Path) -> bool:
    """True if a process has locked its file of a `RoleLock`."""
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


@contextlib.contextmanager
def role_lock(args: RoleArgs, agree: Callable[[bool], bool] = bool) -> Iterator[RoleLock | None]:
    """The lock of a process that is about to take a GPU's memory, held; None where its run's pools share no GPUs.

    Args:
        args: The process.
        agree: As for `RoleLock`.

    Raises:
        ConfigError: There are no locks here.
        ProcessLostError: This process shall end.
    """
    if not args.job.takes_turns:
        yield None
        return
    control, parent = args.job.recipe.control, directories_for_files()[0]
    with contextlib.ExitStack() as stack:
        try:
            folder = stack.enter_context(shared_scratch(f"turns-{args.job.run_id}", str(parent)))
            lock = RoleLock(folder, args.role, args.name, interrupted=args.stop.is_set, agree=agree)
            stack.enter_context(lock)
            lock.acquire()
        except OSError as error:
            raise ConfigError(
                f"files in {parent} cannot be made and locked: {error}; rollout.placement = 'colocated' needs that for "
                "all processes of a run on a machine; make it a folder of memory or of a local disk that they share"
            ) from error
        # Nobody is told to wake before all have said that they sleep. One that starts, or was given up, may be awake.
        lock.patience_s = max(control.progress_timeout_s, control.join_timeout_s)
        yield lock


class Turns:
    """Keeps a process to its turns; it has made what takes memory, and goes to sleep. One thread calls its methods.

    Args:
        lock: Of its role, held.
        sleep: Gives its memory up.
        wake: Takes it again.

    Attributes:
        is_asleep: Whether it sleeps.
    """

    def __init__(self, lock: RoleLock, *, sleep: Callable[[], None], wake: Callable[[], None]) -> None:
        self._lock: Final = lock
        self._sleep: Final = sleep
        self._wake: Final = wake
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
        self._lock.acquire()
        self._wake()
        self.is_asleep = False
        self._spent["asleep_s"] += began - self._since
        self._spent["to_wake_s"] += time.monotonic() - began

    def gauges(self) -> dict[str, float]:
        """Seconds asleep since the start, and spent on going to sleep and on waking."""
        asleep_s = time.monotonic() - self._since if self.is_asleep else 0.0
        return {**self._spent, "asleep_s": self._spent["asleep_s"] + asleep_s}
