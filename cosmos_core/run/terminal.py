"""Prints events of a run on the terminal: membership, settings and problems, each once, in a line, as it happens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from cosmos_core.config.job import Job
from cosmos_core.control.machine.state import State
from cosmos_core.transport.messages import Role

_ROLES: Final[tuple[Role, ...]] = ("policy", "rollout")


class TerminalLog:
    """Says what happens in a session and its supervisor does not say itself.

    How the replicas that the supervisor started (`is_own`) are lost, it says itself: with their errors, and with what
    comes next. That one has left as it was asked to is the controller's word: its process may end when the run is over.
    The state that an earlier session came to is `earlier`: that session has told of it.
    """

    def __init__(
        self, job: Job, say: Callable[[str], None], *, is_own: Callable[[str], bool], earlier: State | None = None
    ) -> None:
        self._job: Final = job
        self._say: Final = say
        self._is_own: Final = is_own
        self._known: Final = dict(earlier.status_details) if earlier is not None else {}
        self._told: Final[set[str]] = set()
        self._draining: frozenset[str] = frozenset()
        self._absent: Final[set[Role]] = set()

    def hear(self, hook: str, **arguments: Any) -> None:
        """Take in something that happened, as hooks are told of it (`follower.Notify`)."""
        match hook, arguments:
            case "cosmos_replica_joined", {"replica": name, "role": role} if role in self._absent or not self._is_own(
                name
            ):
                self._say(f"{name} has joined")
            case "cosmos_replica_left", {"replica": name, "reason": "drained"}:
                self._say(f"{name} has left")
            case "cosmos_replica_left", {"replica": name, "reason": reason} if not self._is_own(name):
                self._say(f"{name} was lost: {reason}")
            case "cosmos_setting_changed", {"step": step, "key": key, "before": before, "after": after}:
                self._say(f"{key}: {before} -> {after} from step {step} on")

    def look(self, state: State) -> None:
        """Say what is new of a state: problems, who was asked to leave, and of which role nobody is left."""
        self._look_at_problems(state)
        draining = frozenset(state.draining)
        for name in sorted(draining - self._draining):
            self._say(f"{name} is leaving, as soon as it has finished what it has begun")
        self._draining = draining
        for role in _ROLES:
            is_complete = state.has_started if role == "policy" else state.has_rollouts
            if state.members[role] or not is_complete:
                self._absent.discard(role)
            elif role not in self._absent and not state.outcome:
                self._absent.add(role)
                self._say(
                    f"no {role} replica is left: the run fails unless one joins within "
                    f"{self._job.recipe.control.join_timeout_s:g} s (control.join_timeout_s); "
                    f"cosmos replica {role} --run {self._job.directory} adds one"
                )

    def _look_at_problems(self, state: State) -> None:
        """Say the first of each kind of problem; all are counted in the summary."""
        for kind, detail in state.status_details.items():
            # Not by the words: the same ones, said again, are news as well.
            if kind not in self._told and self._known.get(kind) is not detail:
                self._told.add(kind)
                self._say(f"{kind}: {detail}")
