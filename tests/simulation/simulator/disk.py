"""The controller's disk: what a commit made durable outlives the controller, what was only appended does not.

A commit may take long, fail, or be the moment in which the controller is killed. Of one that failed, everything may
have been written, or nothing: that is all that a disk promises.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Final

from cosmos_core.control.machine import core
from cosmos_core.control.machine.events import EVENTS, Event, Recovered, Resumed
from cosmos_core.control.machine.recovery import RECOVERY_SNAPSHOT, is_known, snapshot_of
from cosmos_core.control.machine.state import State
from cosmos_core.errors import JournalError
from tests.simulation.simulator.faults import Faults


class Killed(Exception):  # noqa: N818 - not an error of anybody
    """The controller's process ends here."""


class Disk:
    """Holds the journal.

    Attributes:
        faults: What goes wrong; the owner changes it when faults cease.
        committed: Events that are durable, encoded.
        snapshots: Of checkpoints that were wanted, by step, encoded: with one of those that are saved a new journal can
            begin.
        is_full: Whether nothing can be written.
        settled: How many of the first events no power cut takes.
        num_commits: Commits that had something to write.
        num_failures: Those that failed.
    """

    def __init__(self, rng: random.Random, faults: Faults) -> None:
        self.faults = faults
        self.committed: Final[list[bytes]] = []
        self.snapshots: Final[dict[int, bytes]] = {}
        self.is_full = False
        self.settled = 1
        self.num_commits = 0
        self.num_failures = 0
        self._noted = (0, 0, 0)
        self._rng: Final = rng

    def keep_snapshots(self, state: State) -> list[int]:
        """Keep a snapshot of the newest checkpoint that is wanted, with its evaluations, and none of what was undone.

        Each controller writes one: a run that goes on from it must not use a term or a lease twice.

        Args:
            state: The run's, all of it durable.

        Returns:
            Steps of which there is a snapshot of what the journal has not, as if it had lost that.
        """
        unknown = [step for step, data in self.snapshots.items() if not is_known(RECOVERY_SNAPSHOT.decode(data), state)]
        for step in [step for step in self.snapshots if step > state.step]:
            del self.snapshots[step]
        newest = max({state.checkpoints.ordered, *state.checkpoints.saved} & state.marks.keys(), default=-1)
        due = state.term, newest, len(state.evaluations)
        if newest >= 0 and due != self._noted:
            self._noted = due
            self.snapshots[newest] = RECOVERY_SNAPSHOT.encode(snapshot_of(state, newest))
        return unknown

    def go_on(self, state: State, *, is_lost: bool) -> int | None:
        """Have the run go on from its newest checkpoint: what its journal goes on with, or a new one begins with.

        Args:
            state: Of the journal.
            is_lost: Whether the journal is lost.

        Returns:
            The step; None if there is no such checkpoint, and nothing was done.
        """
        saved = state.checkpoints.saved.keys()
        step = max(saved & self.snapshots.keys() if is_lost else saved, default=None)
        if step is None:
            return None
        if is_lost:
            snapshot, path = self.snapshots[step], state.checkpoints.saved[step]
            self.committed[:] = [EVENTS.encode(Recovered(snapshot=snapshot, checkpoint=path))]
        self.committed.append(EVENTS.encode(Resumed(step=step, settings=state.settings)))
        # No other controller is started before the first one listens, and what it goes on with is settled by then.
        self.settled = len(self.committed)
        return step

    def lose_end(self) -> State | None:
        """Lose the end of the journal; what is settled stays, and so does what has a snapshot: its loss is noticed.

        Returns:
            What is left leads to this state; None if nothing was lost.
        """
        kept = self._rng.randint(self.settled, len(self.committed))
        state = core.fold(EVENTS.decode(data) for data in self.committed[:kept])
        snapshots = [RECOVERY_SNAPSHOT.decode(data) for data in self.snapshots.values()]
        is_noticed = any(
            each.step > state.step or each.generation_number > state.generation_number for each in snapshots
        )
        if is_noticed or kept == len(self.committed):
            return None
        del self.committed[kept:]
        return state

    def write(self, events: list[bytes]) -> float:
        """Make events durable; how many seconds that takes.

        Raises:
            JournalError: It failed.
            Killed: The controller was killed meanwhile.
        """
        self.num_commits += 1
        if self.is_full or self._rng.random() < self.faults.commit_failure:
            self.num_failures += 1
            if not self.is_full and self._rng.random() < 0.5:
                self.committed.extend(events)
            raise JournalError("journal.sqlite: database or disk is full" if self.is_full else "disk I/O error")
        if self._rng.random() < self.faults.commit_crash:
            if self._rng.random() < 0.5:
                self.committed.extend(events)
            raise Killed
        self.committed.extend(events)
        return self._rng.random() * self.faults.slow_s if self._rng.random() < self.faults.slow_commit else 0.0


class Opened:
    """The journal as one controller has it open.

    Args:
        disk: Where it lies.
        observe: Called with every event that is appended, as it will be read.

    Attributes:
        pending: Appended, and not durable yet.
        took_s: How long commits took since it was set to zero.
    """

    def __init__(self, disk: Disk, observe: Callable[[Event], None]) -> None:
        self.pending: list[bytes] = []
        self.took_s = 0.0
        self._disk: Final = disk
        self._observe: Final = observe

    def append(self, event: Event) -> int:
        """Add an event to what the next commit makes durable."""
        data = EVENTS.encode(event)
        self.pending.append(data)
        self._observe(EVENTS.decode(data))
        return len(self._disk.committed) + len(self.pending)

    def commit(self) -> int:
        """Make everything appended durable.

        Raises:
            JournalError: It failed.
            Killed: The controller was killed meanwhile.
        """
        number = len(self.pending)
        self.took_s += self._disk.write(self.pending) if number else 0.0
        self.pending = []
        return number

    def settle(self) -> None:
        """Make everything appended durable, for good.

        Raises:
            JournalError: It failed.
            Killed: The controller was killed meanwhile.
        """
        self.commit()
        self._disk.settled = len(self._disk.committed)
