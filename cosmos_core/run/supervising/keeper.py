"""What becomes of replicas that a session started: given up with the controller, started again, or done without."""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

import attrs

from cosmos_core.config.job import Job
from cosmos_core.control.machine.state import State
from cosmos_core.run.petitions import Petitions
from cosmos_core.run.supervising.entrance import barred
from cosmos_core.run.supervising.fleet import Fleet, Member
from cosmos_core.run.supervising.restarts import Restarts, cause_of, last_words
from cosmos_core.run.supervising.roster import role_of
from cosmos_core.transport.requests import Lost

_VERDICT_S: Final = 3.0
"""How long the controller may take to say that a replica which has ended was told to."""

Kind: TypeAlias = Literal["left", "started", "spent", "refused", "failed"]
"""`left`: as it was asked to; `started`: once more; `spent`: killed too often for that; `refused`: it would be
again; `failed`: by an error of its own, which would come again."""


@attrs.frozen(kw_only=True)
class Fate:
    """What became of a replica that has ended, and that in words; of one that has left, the controller tells."""

    kind: Kind
    words: str = ""


class Keeper:
    """Sees to the replicas of a fleet.

    Args:
        job: The run.
        fleet: Its replicas of this session.
        petitions: What is asked of the controller.

    Attributes:
        fleet: As given.
    """

    def __init__(self, job: Job, fleet: Fleet, petitions: Petitions) -> None:
        self.fleet: Final = fleet
        self._job: Final = job
        self._petitions: Final = petitions
        self._restarts: Final = Restarts(job.recipe.launch.restarts)

    def look(self, state: State) -> None:
        """Note who has joined, and end those that the controller has given up and that run all the same."""
        for member in self.fleet.look(state):
            self.fleet.give_up(member, state.fenced[member.incarnation])

    def attend(self, member: Member, state: State, now: float, *, may_restart: bool = True) -> Fate | None:
        """See to a replica that has ended.

        Args:
            member: One of `Fleet.gone`.
            state: The run's.
            now: Seconds of any monotonic clock.
            may_restart: Whether one that was killed is still wanted.

        Returns:
            What became of it; None while the controller may still say that it was told to end.

        Raises:
            ReplicaError: The system refused to start it again.
        """
        name, words = member.name, ending_of(member)
        if name in state.departed:
            return Fate(kind="left")
        cause = cause_of(member.end)
        if cause == "left" and now - member.ended_at < _VERDICT_S:
            return None
        if cause in {"failed", "refused"}:
            return Fate(kind="failed" if cause == "failed" else "refused", words=words)
        if member.has_joined and not member.given_up:
            reason = last_words(member.end)
            self._petitions.add(Lost(name=name, incarnation=member.incarnation, reason=reason))
        if why := barred(self._job, role_of(member.specs[0]), name):
            return Fate(kind="refused", words=f"{words}; {why}")
        if not may_restart or not self._restarts.take(name, now):
            return Fate(kind="spent", words=words)
        self.fleet.start(member)
        return Fate(kind="started", words=f"{words}; {name} is started again")


def ending_of(member: Member) -> str:
    """How a replica ended, in words."""
    return member.given_up or f"{member.end.name} ended: {last_words(member.end)}"
