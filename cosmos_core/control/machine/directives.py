"""Directives: the desired state of each replica, derived from the state of the run. Nothing here changes it."""

from __future__ import annotations

import functools
from typing import Final

import attrs

from cosmos_core.control.machine import profiles, publication, relays, turns
from cosmos_core.control.machine.state import Replica, State
from cosmos_core.transport.directives import PolicyDirective, Relaying, RolloutDirective, WeightTarget
from cosmos_core.weights.topology import Place, distances


class Offers:
    """For a pass over many replicas: what they have in common is derived once. The state must not change meanwhile."""

    def __init__(self, state: State) -> None:
        self._state: Final = state
        self._published: Final[dict[tuple[str, str], WeightTarget]] = {}

    def target(self, replica: Replica) -> WeightTarget | None:
        """The weights that a rollout replica shall load, nearest source first; None while nobody can serve it."""
        newest = self._state.target
        for parent in relays.above(self._state, replica):
            if newest in parent.kept:
                return self._relayed(newest, parent)
            if parent.version < newest:
                # It is behind, and will have the newest; what it has is better than nothing new meanwhile.
                version = max(parent.kept, default=-1)
                return self._relayed(version, parent) if version > replica.version else None
        return self.published(replica)

    def published(self, replica: Replica) -> WeightTarget | None:
        """The newest target, from the policy; None while no policy replica can serve it."""
        if not self._sources:
            return None
        # A label that no source has is as good as none.
        host = replica.host if replica.host in self._hosts else ""
        rack = replica.rack if replica.rack in self._racks else ""
        found = self._published.get((host, rack))
        if found is None:
            found = self._published[host, rack] = self._nearest_first(Place(host=host, rack=rack))
        return found

    def relaying(self, replica: Replica, retained: int) -> Relaying:
        """A rollout replica's place in the tree; policy replicas retain versions from `retained` on."""
        level = sum(1 for _ in relays.above(self._state, replica))
        keep = relays.passes_on(self._state, replica)
        return Relaying(
            level=level,
            reserve=self.published(replica) if level else None,
            keep=keep,
            retain=retained if keep else self._state.target + 1,
        )

    @functools.cached_property
    def _sources(self) -> list[Place]:
        """The policy's processes that serve the newest target."""
        known = self._state.published.get(self._state.target)
        names = known.sources if known is not None else set()
        return [place for name, place in relays.policy_places(self._state) if name in names]

    @functools.cached_property
    def _hosts(self) -> set[str]:
        return {place.host for place in self._sources}

    @functools.cached_property
    def _racks(self) -> set[str]:
        return {place.rack for place in self._sources}

    def _nearest_first(self, reader: Place) -> WeightTarget:
        far = distances(self._sources, [reader])[:, 0].tolist()
        ordered = [self._sources[index] for index in sorted(range(len(far)), key=far.__getitem__)]
        return WeightTarget(
            version=self._state.target,
            digest=self._state.published[self._state.target].digest,
            sources=tuple(place.process for place in ordered),
            hosts=tuple(place.host for place in ordered),
            racks=tuple(place.rack for place in ordered),
        )

    def _relayed(self, version: int, source: Replica) -> WeightTarget:
        return WeightTarget(
            version=version,
            digest=self._state.published[version].digest,
            sources=(source.kept[version],),
            hosts=(source.host,),
            racks=(source.rack,),
        )


def directive_for(state: State, name: str, offers: Offers | None = None) -> PolicyDirective | RolloutDirective:
    """The desired state of a replica that is in the run; `offers` are shared by those of a pass over many replicas."""
    replica = state.replicas[name]
    if replica.role == "rollout":
        return _rollout(state, replica, Offers(state) if offers is None else offers)
    return _policy(state, replica)


def _rollout(state: State, replica: Replica, offers: Offers) -> RolloutDirective:
    sleep, relaying = not turns.may_wake(state, "rollout"), offers.relaying(replica, publication.retained(state))
    return RolloutDirective(
        weights=None if sleep else offers.target(replica),
        leases=tuple(replica.leases.values()),
        hold=tuple(sorted(replica.held)),
        stop=bool(state.outcome),
        relaying=attrs.evolve(relaying, reserve=None) if sleep else relaying,
        leave=replica.is_leaving,
        rollbacks=tuple(state.rollbacks),
        turn=turns.of(state, "rollout"),
        sleep=sleep,
        profile=profiles.order_of(state, replica.name),
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
        turn=turns.of(state, "policy"),
        sleep=not turns.may_wake(state, "policy"),
        profile=profiles.order_of(state, replica.name),
    )
