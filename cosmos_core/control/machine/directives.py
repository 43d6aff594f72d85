"""What each replica shall be doing, derived from the state. Nothing here changes it."""

from __future__ import annotations

from cosmos_core.control.machine import publication
from cosmos_core.control.machine.offers import Offers
from cosmos_core.control.machine.state import Replica, State
from cosmos_core.transport.directives import PolicyDirective, RolloutDirective


def directive_for(state: State, name: str, offers: Offers | None = None) -> PolicyDirective | RolloutDirective:
    """The desired state of a replica that is in the run.

    Args:
        state: The run's.
        name: The replica's.
        offers: Of this state, to be shared by those of a pass over many replicas.
    """
    replica = state.replicas[name]
    if replica.role == "rollout":
        return _rollout(state, replica, Offers(state) if offers is None else offers)
    return _policy(state, replica)


def _rollout(state: State, replica: Replica, offers: Offers) -> RolloutDirective:
    return RolloutDirective(
        weights=offers.target(replica),
        leases=tuple(replica.leases.values()),
        hold=tuple(sorted(replica.held)),
        stop=bool(state.outcome),
        relaying=offers.relaying(replica, publication.retained(state)),
        leave=replica.is_leaving,
        rewinds=tuple(state.rewinds),
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
        leave=replica.is_leaving,
    )
