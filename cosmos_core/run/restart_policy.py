"""Decides whether a process that has ended is started again, done without, or ends the run.

A process that was killed says nothing of the run: another one does its work. An error that a replica reports would
come again, and is the run's. One that the controller refuses would be refused again: the run does without it.
"""

from __future__ import annotations

import signal
from collections import deque
from typing import Final, Literal, TypeAlias

import attrs

from cosmos_core.config.job import Job
from cosmos_core.control.machine.state import State
from cosmos_core.errors import ConfigError
from cosmos_core.replica.lifetime import LOST, REFUSED
from cosmos_core.run.fleet import Fleet, Member, role_of
from cosmos_core.run.launch import Exit
from cosmos_core.run.requests import PendingRequests
from cosmos_core.transport.key_folder import read_peers
from cosmos_core.transport.keys import ALLOWED, replica_key
from cosmos_core.transport.messages import Lost, Role

WINDOW_S: Final = 600.0
"""How long a start counts among those that `launch.restarts` allows."""

Cause: TypeAlias = Literal["killed", "left", "refused", "failed"]
"""`killed`: by a signal, or with its work in other hands; `left`: it said that it was done; `refused`: the controller
does not want it, nor another one in its place; `failed`: by an error."""

_OUTSIDE: Final = frozenset({LOST, 128 + signal.SIGTERM, 128 + signal.SIGKILL, 128 + signal.SIGINT})
"""Exit codes of processes that were ended from outside: as replicas say it themselves, and as shells do."""


def cause_of(ended: Exit) -> Cause:
    """The cause of a process's end, by its exit code."""
    if ended.code < 0 or ended.code in _OUTSIDE:
        return "killed"
    if ended.code == REFUSED:
        return "refused"
    return "failed" if ended.code else "left"


def last_words(ended: Exit) -> str:
    """The end of a process in words, with the error that it logged last if it did."""
    how = f"killed by signal {-ended.code}" if ended.code < 0 else f"exit code {ended.code}"
    return f"{ended.error} ({how})" if ended.error else how


class Restarts:
    """Counts how often each replica was started again."""

    def __init__(self, most: int) -> None:
        self._most: Final = most
        self._times: Final[dict[str, deque[float]]] = {}

    def take(self, name: str, now: float) -> bool:
        """True if a replica may be started once more; if so, it is counted."""
        times = self._times.setdefault(name, deque())
        while times and now - times[0] > WINDOW_S:
            times.popleft()
        if len(times) >= self._most:
            return False
        times.append(now)
        return True


def barred(job: Job, role: Role, name: str) -> str:
    """The reason why the controller would refuse the key of a replica; empty if it would not."""
    try:
        key = replica_key(job.keys, role, name)
        peers = read_peers(job.keys / ALLOWED)
    except ConfigError as error:
        return str(error)
    if any(peer.public == key.pair.public for peer in peers.values()):
        return ""
    return f"its key {key.label} was revoked (cosmos keys allow lets it in again)"


_VERDICT_S: Final = 3.0
"""How long the controller may take to say that a replica which has ended was told to."""

Kind: TypeAlias = Literal["left", "started", "spent", "refused", "failed"]
"""`left`: as it was asked to; `started`: once more; `spent`: killed too often for that; `refused`: it would be
again; `failed`: by an error of its own, which would come again."""


@attrs.frozen(kw_only=True)
class Decision:
    """The decision on a replica that has ended, and that in words; of one that has left, the controller tells."""

    kind: Kind
    words: str = ""


class RestartPolicy:
    """Decides on the replicas of a fleet that have ended."""

    def __init__(self, job: Job, fleet: Fleet, requests: PendingRequests) -> None:
        self.fleet: Final = fleet
        self._job: Final = job
        self._requests: Final = requests
        self._restarts: Final = Restarts(job.recipe.launch.restarts)

    def look(self, state: State) -> None:
        """Note who has joined, and end those that the controller has given up and that run all the same."""
        for member in self.fleet.look(state):
            self.fleet.give_up(member, state.fenced[member.incarnation])

    def decide(self, member: Member, state: State, now: float, *, may_restart: bool = True) -> Decision | None:
        """See to a replica that has ended, one of `Fleet.gone`; `may_restart`: one that was killed is still wanted.

        Returns what became of it; None while the controller may still say that it was told to end.
        """
        name, words = member.name, member.given_up or f"{member.end.name} ended: {last_words(member.end)}"
        if name in state.departed:
            return Decision(kind="left")
        cause = cause_of(member.end)
        if cause == "left" and now - member.ended_at < _VERDICT_S:
            return None
        if cause == "failed":
            return Decision(kind="failed", words=words)
        if cause != "refused" and member.has_joined and not member.given_up:
            reason = last_words(member.end)
            self._requests.add(Lost(name=name, incarnation=member.incarnation, reason=reason))
        why = barred(self._job, role_of(member.specs[0]), name)
        if cause == "refused" or why:
            return Decision(kind="refused", words=f"{words}; {why}" if why else words)
        if not may_restart or not self._restarts.take(name, now):
            return Decision(kind="spent", words=words)
        self.fleet.start(member)
        return Decision(kind="started", words=f"{words}; {name} is started again")
