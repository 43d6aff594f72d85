"""What each replica shall be doing, derived from the state. Nothing here changes it."""

from __future__ import annotations

from cosmos_core.controller import publication, relays
from cosmos_core.controller.state import Replica, State
from cosmos_core.transport.messages import PolicyDirective, RolloutDirective


def directive_for(state: State, name: str) -> PolicyDirective | RolloutDirective:
    """The desired state of a replica that is in the run."""
    replica = state.replicas[name]
    return _rollout(state, replica) if replica.role == "rollout" else _policy(state, replica)


def _rollout(state: State, replica: Replica) -> RolloutDirective:
    return RolloutDirective(
        weights=relays.target_of(state, replica),
        leases=tuple(replica.leases.values()),
        hold=tuple(sorted(replica.held)),
        stop=bool(state.outcome),
        relaying=relays.relaying_of(state, replica, publication.retained(state)),
    )


def _policy(state: State, replica: Replica) -> PolicyDirective:
    generation, running = state.generation, state.running
    is_member = generation is not None and replica.name in generation.order.members
    is_ready = is_member and generation is not None and generation.is_ready
    is_current = running is not None and generation is not None and running.generation == generation.order.generation
    return PolicyDirective(
        generation=generation.order if is_member and generation is not None else None,
        train=running.order if running is not None and is_current and is_ready else None,
        # Before its generation is formed a replica may hold weights that the run knows nothing of.
        publish=state.publish if is_ready else -1,
        retain=publication.retained(state),
        checkpoint=state.checkpoints.ordered if is_ready else -1,
        stop=bool(state.outcome),
    )
