"""Supervision: start the processes of a run, follow it, and see to it that it ends, whatever happens.

The supervisor decides nothing about training. It watches the journal through the controller and the exit codes of
the processes, passes Ctrl-C on as a request to stop, and leaves nothing running.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

import attrs

from cosmos_core.config.job import Job
from cosmos_core.config.stages import stages
from cosmos_core.controller.journal import entries
from cosmos_core.errors import ReplicaError
from cosmos_core.observe.live import View
from cosmos_core.run.follow import Follower, Notify
from cosmos_core.run.launch import Exit, Launcher
from cosmos_core.run.observer import Observer
from cosmos_core.run.roster import CONTROLLER, address_file, controller_spec, read_address, replica_specs
from cosmos_core.run.view import progress_of, waits_for

_POLL_S: Final = 0.1
_LISTEN_TIMEOUT_S: Final = 60.0
_VERDICT_S: Final = 3.0  # how long the controller may take to see a failure that we saw
_END_S: Final = 20.0  # how long processes may take to end after the run has
_ASK_AGAIN_S: Final = 1.0
_GRACE_S: Final = 3.0  # between TERM and KILL


@attrs.frozen(kw_only=True)
class Start:
    """Where a run starts from: `step` and the checkpoint's path; both None for a new run, path None for step 0."""

    step: int | None = None
    checkpoint: str | None = None


@attrs.frozen(kw_only=True)
class Ending:
    """How a run ended: `outcome` is `finished`, `stopped` or `failed`; `reason` says why, if there is more to say."""

    outcome: str
    reason: str = ""


class Supervisor:
    """One run's processes, from start to end."""

    def __init__(self, job: Job, launcher: Launcher, view: View, notify: Notify, follower: Follower) -> None:
        self._job: Final = job
        self._launcher: Final = launcher
        self._view: Final = view
        self._notify: Final = notify
        self._follower: Final = follower
        self._stages: Final = stages(job.recipe)
        self._began: Final = time.monotonic()
        self._interrupts = 0
        self._has_answered = False
        self._asked_at = float("-inf")
        self._gauges: dict[str, dict[str, float]] = {}
        self._failure = ""
        self._failed_at = 0.0

    @property
    def gauges(self) -> dict[str, dict[str, float]]:
        """The newest gauges of each process, those that have ended included."""
        return self._gauges

    def run(self, start: Start, first_sequence: int) -> Ending:
        """Run to the end. Whatever happens, no process of the run is left when this returns or raises.

        Args:
            start: Where to start from.
            first_sequence: Newest journal entry that the follower has folded already.

        Raises:
            CosmosError: A process could not be started, or the controller could not be followed.
        """
        with self._signals():
            try:
                observer = self._launch(start)
                observer.last_sequence = first_sequence
                try:
                    self._follow(observer)
                finally:
                    observer.close()
            finally:
                self._launcher.stop(_GRACE_S)
                self._catch_up()
        return self._ending()

    def _launch(self, start: Start) -> Observer:
        """Start the controller, and the replicas once it listens."""
        address_file(self._job).unlink(missing_ok=True)
        self._launcher.start(controller_spec(self._job, resume_step=start.step))
        deadline = time.monotonic() + _LISTEN_TIMEOUT_S
        while (address := read_address(self._job)) is None:
            for ended in self._launcher.exits():
                raise ReplicaError(f"the controller could not start: {_last_words(ended)}")
            if time.monotonic() > deadline:
                raise ReplicaError(
                    f"the controller did not listen within {_LISTEN_TIMEOUT_S:g} s; see {self._job.logs}"
                )
            time.sleep(_POLL_S / 5)
        for spec in replica_specs(self._job, address, start.checkpoint):
            self._launcher.start(spec)
        return Observer(address, self._job.run_id)

    def _follow(self, observer: Observer) -> None:
        """Fold, show and pass on until the run has ended and its processes with it."""
        ended_at = None
        while self._interrupts < 2:
            self._follower.fold(observer.poll(_POLL_S), self._notify)
            self._gauges |= observer.gauges
            elapsed_s = time.monotonic() - self._began
            self._view.show(progress_of(self._follower, self._stages, now=time.time(), elapsed_s=elapsed_s))
            self._answer_interrupt(observer)
            self._watch_exits()
            if self._follower.has_ended and ended_at is None:
                ended_at = time.monotonic()
            if not self._launcher.running() or (ended_at and time.monotonic() > ended_at + _END_S):
                return
            if self._failure and not self._has_outcome() and time.monotonic() > self._failed_at + _VERDICT_S:
                return

    def _answer_interrupt(self, observer: Observer) -> None:
        now, state = time.monotonic(), self._follower.state
        if not self._interrupts or (state is not None and state.is_stopping):
            return
        if now - self._asked_at > _ASK_AGAIN_S:
            self._asked_at = now
            observer.request_stop()
        if not self._has_answered:
            self._has_answered = True
            self._view.say(f"Stopping: waiting for {waits_for(self._follower.state)}. Ctrl-C again to kill the run.")

    def _watch_exits(self) -> None:
        """Note the first process that ended although the run had not."""
        for ended in self._launcher.exits():
            if self._has_outcome() and ended.code == 0:
                continue
            if not self._failure:
                self._failure, self._failed_at = f"{ended.name}: {_last_words(ended)}", time.monotonic()
            if not self._has_outcome() or ended.name != CONTROLLER:
                self._view.say(f"{ended.name} ended: {_last_words(ended)}")

    def _has_outcome(self) -> bool:
        return self._follower.state is not None and bool(self._follower.state.outcome)

    def _catch_up(self) -> None:
        """Fold what the journal holds and no notice brought; every process has ended by now."""
        state = self._follower.state
        if self._job.journal.exists() and (state is None or not self._follower.has_ended):
            rest = (entry for entry in entries(self._job.journal) if entry[0] > self._follower.last_sequence)
            self._follower.fold(rest, self._notify)

    def _ending(self) -> Ending:
        state = self._follower.state
        if state is not None and state.outcome:
            reason = state.reason
            if state.outcome == "failed" and self._failure and self._failure not in reason:
                reason = f"{reason}\n{self._failure}" if reason else self._failure
            return Ending(outcome=state.outcome, reason=reason)
        if self._interrupts >= 2:
            return Ending(outcome="stopped", reason="killed by a second Ctrl-C, without a checkpoint of its last step")
        return Ending(outcome="failed", reason=self._failure or "the controller ended before the run did")

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Count Ctrl-C (and requests to end) instead of dying of them."""

        def interrupt(_number: int, _frame: FrameType | None) -> None:
            self._interrupts += 1

        watched = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        earlier = [(number, signal.signal(number, interrupt)) for number in watched]
        try:
            yield
        finally:
            for number, handler in earlier:
                signal.signal(number, handler)


def _last_words(ended: Exit) -> str:
    how = f"killed by signal {-ended.code}" if ended.code < 0 else f"exit code {ended.code}"
    return f"{ended.error} ({how})" if ended.error else how
