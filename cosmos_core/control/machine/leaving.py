"""Draining: a replica finishes what it has begun, and leaves; nothing is lost with it.

It gets nothing new from the moment it is asked to. A rollout replica goes once it works on nothing and no step needs
its payloads any more; a policy replica, once a generation without it has formed, at a step's boundary, and nobody can
have to read weights from it alone.
"""

from __future__ import annotations

from typing import Final

from cosmos_core.control.machine import membership, relays
from cosmos_core.control.machine.state import Replica, State

_REASON: Final = "it has left, as it was asked to"


def refusal(state: State, name: str) -> str:
    """Why a replica cannot leave; empty if it can."""
    replica = state.replicas.get(name)
    if replica is None:
        words = "has left already" if name in state.departed else "is not in this run"
        return f"{name} {words}, which has {', '.join(sorted(state.replicas)) or 'no replicas'}"
    is_complete = state.has_started if replica.role == "policy" else state.has_rollouts
    if not is_complete:
        return f"the run has not begun, as it waits for {' and '.join(membership.missing(state))}"
    is_needed = replica.role == "policy" or state.settings.num_rollouts > 0
    if is_needed and not any(other.name != name for other in state.staying(replica.role)):
        return f"{name} is the last {replica.role} replica that stays; start another one first, or end the run"
    return ""


def drain(state: State, name: str) -> None:
    """Let a replica begin nothing any more."""
    replica = state.replicas.get(name)
    if replica is None or name in state.draining:
        return
    state.draining.add(name)
    if replica.role == "rollout":
        relays.follow(state, name)
    state.touched.add(name)


def release(state: State) -> None:
    """Tell those that drain and have nothing left to do to leave."""
    for name in sorted(state.draining):
        replica = state.replicas[name]
        if not replica.is_leaving and _is_free(state, replica):
            replica.is_leaving = True
            state.touched.add(name)


def leave(state: State, replica: Replica) -> None:
    """A replica says that it ends, as it was told to."""
    membership.lose(state, replica, _REASON)
    state.departed.add(replica.name)


def _is_free(state: State, replica: Replica) -> bool:
    if replica.role == "rollout":
        return not replica.leases and not replica.held
    generation = state.generation
    if generation is None or not generation.is_ready or replica.name in generation.order.members:
        return False
    return not any(_is_only_source(state, replica, version) for version in state.published)


def _is_only_source(state: State, replica: Replica, version: int) -> bool:
    """Whether somebody may have to read a version, and only from those that leave."""
    sources = state.published[version].sources
    if version < state.target or replica.name not in sources or sources - state.draining:
        return False
    return any(rollout.version < version for rollout in state.named("rollout"))
