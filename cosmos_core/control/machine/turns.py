"""Turns of a run whose pools share GPUs: one pool is awake, and the other wakes once all of that have gone to sleep.

The turn is the policy's while it has work, else the rollout replicas'. Each turn has a number, and a replica says of
which turn it is that it sleeps: one that was told to wake in an earlier turn, and has not heard that this is over,
may wake yet. All replicas join asleep, and who is lost is asleep.
"""

from __future__ import annotations

from cosmos_core.control.machine import evaluation, relays
from cosmos_core.control.machine.state import Replica, State
from cosmos_core.transport.messages import Role
from cosmos_core.transport.reports import Slept


def holder(state: State) -> Role:
    """The pool whose turn it is."""
    return "rollout" if state.turn % 2 else "policy"


def may_wake(state: State, role: Role) -> bool:
    """True if replicas of a pool shall be awake."""
    return not state.settings.takes_turns or (holder(state) == role and not state.sleepless)


def of(state: State, role: Role) -> int:
    """The newest turn that was not a pool's own: of that one its replicas say that they sleep."""
    return state.turn - (holder(state) == role)


def take(state: State) -> None:
    """Begin the next turn if the other pool has work now."""
    if not state.settings.takes_turns or (holder(state) == "policy") == _has_policy_work(state):
        return
    state.sleepless = set(state.members[holder(state)])
    state.turn += 1
    state.touch()


def trust(state: State) -> None:
    """Note what policy replicas, which are at work, were asked for: they do that before they go to sleep."""
    state.trusted = state.publish, state.checkpoints.ordered


def on_slept(state: State, replica: Replica, report: Slept) -> None:
    """A replica sleeps; a rollout replica has no weights then."""
    if replica.role == "rollout":
        state.hold(replica, -1)
        relays.touch_below(state, replica.name)
        evaluation.abandon(state)
    if report.turn == state.turn:
        rest(state, replica.name)


def rest(state: State, name: str) -> None:
    """Count a replica as asleep."""
    if name in state.sleepless:
        state.sleepless.remove(name)
        if not state.sleepless:
            state.touch(holder(state))


def _has_policy_work(state: State) -> bool:
    generation, (version, checkpoint) = state.generation, state.trusted
    if generation is None or not generation.is_ready or state.running is not None:
        return True
    known = state.published.get(state.publish)
    is_published = state.publish in (-1, version) or (known is not None and bool(known.sources))
    return not is_published or state.checkpoints.ordered not in (-1, checkpoint)
