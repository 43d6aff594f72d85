"""`cosmos status`: a run as lines, JSON or, with `--watch`, a screen; from its controller or else its journal."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import attrs
import msgspec
from rich.console import Console
from rich.live import Live
from rich.text import Text

from cosmos_core.config.job import Job, stages
from cosmos_core.config.loading import load_job
from cosmos_core.control.journal import entries
from cosmos_core.control.live.diagnosis import findings
from cosmos_core.control.live.event_feed import EventFeed
from cosmos_core.control.live.snapshot import Snapshot, status_of, take
from cosmos_core.control.machine import changes
from cosmos_core.control.machine.events import Event
from cosmos_core.control.machine.progress import best_checkpoint
from cosmos_core.control.machine.state import State
from cosmos_core.control.recovery_snapshots import require_known
from cosmos_core.errors import DamagedJournalError, JournalError
from cosmos_core.observe.live import line
from cosmos_core.policy.checkpoints.checkpoint import completed
from cosmos_core.run import folder
from cosmos_core.run.address import absence, announced, find_address, page_words, read_address
from cosmos_core.run.follower import WAITING, Follower, progress_of
from cosmos_core.run.observer import Observer, so_far
from cosmos_core.run.screen import lines, screen
from cosmos_core.transport.keys import person_key

INTERRUPTED: Final = "interrupted"


def ended(job: Job, state: State) -> tuple[str, str]:
    """Outcome and reason of a run without a controller; no outcome if its last session came to none."""
    if not state.outcome and (summary := folder.read_summary(job.directory)) is not None:
        # The supervisor ended it, after the controller.
        return summary.outcome, summary.reason
    return state.outcome, state.reason


def interrupted(job: Job) -> str:
    """The line about a run that came to no outcome."""
    return f"{INTERRUPTED}: {absence(job)}; cosmos run --resume goes on"


def look(directory: Path) -> Iterator[str]:
    """Lines about a run, for people."""
    job = load_job(directory)
    follower, gauges = Follower(), dict[str, dict[str, float]]()
    address = find_address(job)
    if address is not None:
        follower.fold(so_far(address, job.run_id, person_key(job.keys), gauges=gauges))
    else:
        follower.fold(entries(job.journal) if job.journal.exists() else ())
        require_known(job.recovery_snapshots, follower.state)
    state = follower.state
    if state is None:
        yield f"{job.recipe.run.name}: {'starting' if folder.is_held(job.directory) else 'not begun yet'}"
        return
    progress = progress_of(follower, stages(job.recipe), gauges, now=None if address is None else time.time())
    if address is not None:
        reason = state.reason
        verdict = f"running, {state.outcome} in a moment" if state.outcome else "running"
    else:
        outcome, reason = ended(job, state)
        verdict = outcome or interrupted(job)
        progress = attrs.evolve(progress, phase=outcome or INTERRUPTED)
    yield f"{job.recipe.run.name}: {verdict}"
    yield line(progress)
    if address is not None:
        yield from _replicas(state, gauges)
        yield from (f"  {words}" for words in page_words(job))
    yield from settings_lines(state)
    yield from (f"  {each}" for each in findings(state))
    yield from (f"  {kind}: {detail}" for kind, detail in state.status_details.items())
    best = best_checkpoint(state)
    for step in sorted(state.checkpoints.saved.keys() & set(completed(job.checkpoints))):
        words = " (best evaluated checkpoint)" if step == best else ""
        yield f"  checkpoint of step {step}{words}: {state.checkpoints.saved[step]}"
    if reason:
        yield reason
    if (job.directory / folder.REPORT).exists():
        yield f"  report: {job.directory / folder.REPORT}"


def _replicas(state: State, gauges: Mapping[str, Mapping[str, float]]) -> Iterator[str]:
    for replica in (*state.named("policy"), *state.named("rollout")):
        held = replica.step if replica.role == "policy" else replica.version
        work = f", {len(replica.leases)} prompts in flight" if replica.role == "rollout" else ""
        used = gauges.get(replica.name, {})
        if "memory_bytes" in used:
            work += f", at most {used['memory_bytes'] / 2**30:.1f} GiB so far"
        if "mfu" in used:
            work += f", MFU {used['mfu']:.0%}"
        place = f"pid {replica.pid} on {replica.host}"
        yield f"  {replica.name}: {status_of(state, replica)}, weights of step {max(0, held)}{work}, {place}"
    for name in sorted(state.departed):
        yield f"  {name}: has left, as it was asked to"
    # Those that were lost and have not come back, each with the newest reason.
    reasons = {words.partition(": ")[0]: words for words in state.fenced.values()}
    gone = reasons.keys() - state.replicas.keys() - state.departed
    yield from (f"  {words}" for name, words in reasons.items() if name in gone)


def settings_lines(state: State) -> Iterator[str]:
    """Dynamic keys that are not as in the recipe, or will not be from a step on."""
    recipe = {each.key: each.value for each in state.settings.dynamic}
    newest = {change.key: change for change in state.changes}
    for key, change in sorted(newest.items()):
        step = changes.first_step(state.settings, key, change.step)
        has_come = step <= state.step + 1
        if not (has_come and change.after == recipe.get(key)):
            yield f"  {key} = {change.after} {'since' if has_come else 'from'} step {step} (recipe: {recipe.get(key)})"


_LONG: Final = ("curves", "heldout", "samples", "news")
"""Fields of a snapshot that are left out of its JSON."""
_TOLD_S: Final = 1.0
_POLL_S: Final = 0.25
_PLAIN_S: Final = 5.0
_GONE_S: Final = 15.0
"""How long a controller that is gone may take to come back before watching ends."""


class Watcher:
    """A run as seen from outside, from its controller's notices."""

    def __init__(self, job: Job) -> None:
        self._job: Final = job
        self._stages: Final = stages(job.recipe)
        self._follower: Final = Follower()
        self._feed: Final = EventFeed()
        self._gauges: dict[str, dict[str, float]] = {}
        self._silent = ""

    def fold(self, found: Iterable[tuple[int, float, Event]]) -> None:
        """Take in journal entries, in order; those that were taken in before are passed over."""
        entry = None
        for entry in found:
            if entry[0] <= self._follower.last_sequence:
                continue
            step = self._follower.state.step if self._follower.state is not None else -1
            self._follower.fold((entry,))
            self._feed.note(entry[2], entry[1])
            # A journal is read at once: what its steps were is noted at their own times.
            if self._follower.state is not None and self._follower.state.step != step:
                self._feed.catch_up(self._follower.state, entry[1])
        if entry is not None and self._follower.state is not None:
            self._feed.catch_up(self._follower.state, entry[1])

    def as_json(self, snapshot: Snapshot | None) -> str:
        """A snapshot, the checkpoints and the report's path as one JSON object on one line."""
        names = [each.name for each in attrs.fields(Snapshot) if each.name not in _LONG]
        told: dict[str, Any] = {"name": self._job.recipe.run.name, "run_id": self._job.run_id, "phase": "not begun"}
        told |= {name: getattr(snapshot, name) for name in names if snapshot is not None}
        state, report = self._follower.state, self._job.directory / folder.REPORT
        saved = {} if state is None else state.checkpoints.saved
        told["checkpoints"] = {step: saved[step] for step in completed(self._job.checkpoints) if step in saved}
        told["best_checkpoint"] = None if state is None else best_checkpoint(state)
        told["report"] = str(report) if report.exists() else None
        return msgspec.json.encode(told).decode()

    def follow(self) -> Iterator[Snapshot | None]:
        """Snapshots a few times a second until the run has ended; None while there is nothing to see yet."""
        self._read_journal()
        gone_at = time.monotonic()
        while not self._follower.has_ended:
            if (address := self._address()) is not None:
                yield from self._listen(address)
                gone_at = time.monotonic() - (_GONE_S if self._silent else 0.0)
            elif time.monotonic() - gone_at > _GONE_S or not self._may_return():
                break
            else:
                time.sleep(_POLL_S)
                snapshot = self.snapshot()
                yield None if snapshot is None else attrs.evolve(snapshot, phase=WAITING)
        if (problem := self._read_journal()) is not None:
            raise problem
        yield self._unattended()

    def snapshot(self) -> Snapshot | None:
        """The run as it is known now; None before anything is."""
        state = self._follower.state
        if state is None:
            return None
        name = self._job.recipe.run.name
        return take(
            state,
            self._feed,
            self._follower.timeline,
            self._stages,
            self._gauges,
            name=name,
            now=time.time(),
            is_running=self._address() is not None,
        )

    def _unattended(self) -> Snapshot | None:
        """The run as it was left; of the replicas that it had, only those that were lost tell something."""
        state, snapshot = self._follower.state, self.snapshot()
        if state is None or snapshot is None:
            return None
        outcome, reason = ended(self._job, state)
        return attrs.evolve(
            snapshot,
            phase=outcome or INTERRUPTED,
            outcome=outcome,
            reason=reason,
            statuses={},
            replicas=tuple(replica for replica in snapshot.replicas if replica.status == "lost"),
        )

    def _may_return(self) -> bool:
        """True if a controller that is gone may come back: a session has the run, or it is not seen from here."""
        found = announced(self._job)
        is_elsewhere = found is not None and found.is_elsewhere
        return self._follower.state is None or is_elsewhere or folder.is_held(self._job.directory)

    def _read_journal(self) -> JournalError | None:
        """Take in what no controller tells any more; why it could not be read (one that starts has it locked)."""
        if self._follower.has_ended or self._address() is not None:
            return None
        try:
            self.fold(entries(self._job.journal) if self._job.journal.exists() else ())
            require_known(self._job.recovery_snapshots, self._follower.state)
        except DamagedJournalError:
            raise
        except JournalError as error:
            return error
        return None

    def _address(self) -> str | None:
        """The controller's address; None if it is gone, or is on another machine and was given up as silent."""
        address = read_address(self._job)
        return None if address == self._silent else address

    def _listen(self, address: str) -> Iterator[Snapshot | None]:
        """Follow one controller until it ends the run or is gone."""
        began, found = time.monotonic(), announced(self._job)
        is_elsewhere = found is not None and found.is_elsewhere
        with Observer(address, self._job.run_id, person_key(self._job.keys)) as observer:
            observer.last_sequence = self._follower.last_sequence
            present = -1
            while not self._follower.has_ended and read_address(self._job) == address:
                until = time.monotonic() + _POLL_S
                while (left := until - time.monotonic()) > 0:
                    self.fold(observer.poll(left))
                self._gauges = observer.gauges
                if is_elsewhere and min(observer.silence_s, time.monotonic() - began) > _GONE_S:
                    self._silent = address
                    return
                # A long history comes in parts: figures of a part of it are no figures of now.
                present = observer.newest if present < 0 else present
                if not self._follower.has_ended:
                    yield self.snapshot() if 0 <= present <= observer.last_sequence else None


def tell(directory: Path, *, watches: bool) -> Iterator[str]:
    """The run as JSON, a line; if it `watches`, one a second until it has ended."""
    job = load_job(directory)
    watcher, due = Watcher(job), 0.0
    if not watches:
        known = watcher.follow() if job.journal.exists() else iter(())
        yield watcher.as_json(next((each for each in known if each is not None), None))
        return
    for snapshot in watcher.follow():
        has_ended = snapshot is not None and snapshot.phase in (snapshot.outcome, INTERRUPTED)
        if time.monotonic() >= due or has_ended:
            due = time.monotonic() + _TOLD_S
            yield watcher.as_json(snapshot)


def watch(directory: Path, console: Console) -> str:
    """Show a run until it has ended; its outcome, empty if it came to none."""
    job = load_job(directory)
    watcher = Watcher(job)
    show = _on_screen if console.is_terminal and not console.is_dumb_terminal else _in_lines
    shown = show(watcher, console)
    if shown is None:
        console.print(f"{directory}: not begun yet, and no controller came", highlight=False, markup=False)
        return ""
    if not shown.outcome:
        console.print(f"{shown.name}: {interrupted(job)}", highlight=False, markup=False)
    return shown.outcome


def _on_screen(watcher: Watcher, console: Console) -> Snapshot | None:
    last = None
    with Live(console=console, auto_refresh=False, transient=True) as live:
        for snapshot in watcher.follow():
            if snapshot is not None:
                last = snapshot
                live.update(screen(snapshot, height=console.height), refresh=True)
    if last is not None:
        console.print(screen(last))
    return last


def _in_lines(watcher: Watcher, console: Console) -> Snapshot | None:
    """A line every few seconds, and what happened as soon as it has."""
    last, told, due = None, 0.0, 0.0
    for snapshot in watcher.follow():
        if snapshot is None:
            continue
        last = snapshot
        fresh = [news for news in snapshot.news if news.time > told]
        told = max((news.time for news in snapshot.news), default=told)
        words = [f"  {news.kind}: {news.text}" for news in fresh]
        if time.monotonic() >= due or snapshot.outcome:
            due = time.monotonic() + _PLAIN_S
            words += lines(snapshot)
        for text in words:
            console.print(Text(text), soft_wrap=True)
    return last
