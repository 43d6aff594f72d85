"""Relays: rollout replicas that have a weight version pass it on to others, in a tree below the policy.

The tree follows the membership. A replica whose last weights were refused is not in it, and neither is one that maps
the policy's own copy; these read from the policy. What a replica reads from was reported to hold the version with the
published digest; whoever waits for a parent is told of the policy, too, as only it knows how long it has waited.

Who comes is given a place, and who goes leaves its readers to be given others: nobody else is moved, as most of that
would be copies made for nothing, and thousands of replicas may come one by one. Once a quarter of them have come or
gone, and once all of the recipe have, the whole tree is laid out anew, so that it stays shallow and local.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from cosmos_core.control.machine.state import Replica, State
from cosmos_core.transport.addresses import split_places
from cosmos_core.weights import topology
from cosmos_core.weights.topology import Place

_SHARE: Final = 4
"""The tree is laid out anew once one in so many replicas has come or gone."""
_POLICY: Final = ""
"""Stands for the policy among those who are read from."""


def arrange(state: State) -> None:
    """Lay the whole tree out anew; a replica that nobody reads from any more drops its copies."""
    if not state.settings.sync_fan_out:
        return
    policies = policy_places(state)
    state.mapped = _mapped(state, policies)
    replicas = afar(state)
    places = [Place(host=each.host, rack=each.rack) for each in replicas]
    found = topology.parents(places, _shared([place for _, place in policies]), state.settings.sync_fan_out)
    parents = {
        replica.name: replicas[parent].name
        for replica, parent in zip(replicas, found, strict=True)
        if parent != topology.ORIGIN
    }
    state.parents, state.readers, state.num_moves = parents, {}, 0
    for replica in replicas:
        state.readers.setdefault(parents.get(replica.name, _POLICY), set()).add(replica.name)
    for replica in state.named("rollout"):
        _settle(state, replica)


def follow_policy(state: State) -> None:
    """A policy replica has come or gone: who maps its copies may be others now."""
    if state.settings.sync_fan_out and _mapped(state, policy_places(state)) != state.mapped:
        arrange(state)


def follow(state: State, name: str) -> None:
    """A rollout replica has come, is trusted again, has gone, or is not to be read from any more."""
    if not state.settings.sync_fan_out:
        return
    state.num_moves += 1
    if state.num_moves * _SHARE > len(state.members["rollout"]):
        arrange(state)
        return
    source = state.parents.get(name, _POLICY)
    orphans = _take_out(state, name)
    replica = state.replicas.get(name)
    if replica is not None and _is_afar(state, replica):
        _put(state, replica)
    for orphan in sorted(orphans):
        _put(state, state.replicas[orphan])
    for each in (source, name):
        if each in state.replicas:
            _settle(state, state.replicas[each])


def afar(state: State) -> list[Replica]:
    """Rollout replicas that take part in the tree, by name: trusted ones that stay and do not map a copy."""
    return [each for each in state.named("rollout") if _is_afar(state, each)]


def passes_on(state: State, replica: Replica) -> bool:
    """True if others read from a replica, or may soon: until all have joined, nobody knows who will."""
    if replica.name in state.readers:
        return True
    may_be_read = not state.has_rollouts and state.settings.rollout_replicas > state.settings.sync_fan_out
    return may_be_read and _is_afar(state, replica)


def touch_below(state: State, name: str) -> None:
    """Note that the directives of a replica and of those below it may have changed."""
    below = [name]
    while below:
        name = below.pop()
        state.touched.add(name)
        below += state.readers.get(name, ())


def above(state: State, replica: Replica) -> Iterator[Replica]:
    """Yield the relays between a replica and the policy, the nearest first."""
    name = state.parents.get(replica.name)
    while name is not None:
        yield state.replicas[name]
        name = state.parents.get(name)


def policy_places(state: State) -> list[tuple[str, Place]]:
    """Name of the replica and place of each process of the policy; `process` is its endpoint, which is unique."""
    return [
        (replica.name, Place(process=place.endpoint, host=place.host, rack=place.rack or replica.rack))
        for replica in state.named("policy")
        for place in split_places(replica.endpoints.get("weights", ""), replica.host)
    ]


def _take_out(state: State, name: str) -> set[str]:
    """Take a replica out of the tree, if it is there; those that read from it, who have no place now."""
    above = state.parents.pop(name, _POLICY)
    readers = state.readers.get(above, set())
    readers.discard(name)
    if not readers:
        state.readers.pop(above, None)
    orphans = state.readers.pop(name, set())
    for orphan in orphans:
        del state.parents[orphan]
    return orphans


def _put(state: State, replica: Replica) -> None:
    """Give a replica, and with it those that read from it, a place: the nearest of the least depth that has one."""
    level = [_POLICY]
    while not (free := [name for name in level if len(state.readers.get(name, ())) < state.settings.sync_fan_out]):
        level = [reader for name in level for reader in state.readers[name]]
    above = min(free, key=lambda name: _preference(state, name, replica))
    state.readers.setdefault(above, set()).add(replica.name)
    if above != _POLICY:
        state.parents[replica.name] = above
        _settle(state, state.replicas[above])
    touch_below(state, replica.name)


def _preference(state: State, name: str, reader: Replica) -> tuple[int, int, str]:
    """The smaller, the better to read from."""
    far = _far(state.replicas[name], reader) if name != _POLICY else 0
    return far, len(state.readers.get(name, ())), name


def _far(first: Replica, second: Replica) -> int:
    """The distance between two; of what is not known nothing is shared."""
    if first.host and first.host == second.host:
        return 0
    return 1 if first.rack and first.rack == second.rack else 2


def _settle(state: State, replica: Replica) -> None:
    """See whether a replica still keeps its copies: who is told to drop them has none."""
    state.touched.add(replica.name)
    if replica.kept and not passes_on(state, replica):
        replica.kept.clear()


def _is_afar(state: State, replica: Replica) -> bool:
    if replica.name in state.draining or replica.is_doubted or not state.settings.sync_fan_out:
        return False
    return replica.host not in state.mapped


def _mapped(state: State, policies: list[tuple[str, Place]]) -> set[str]:
    """Hosts with a whole policy replica, whose copy rollout replicas there map."""
    hosts: dict[str, set[str]] = {}
    for name, place in policies:
        hosts.setdefault(name, set()).add(place.host)
    return {next(iter(each)) for each in hosts.values() if len(each) == 1} if state.settings.shares_memory else set()


def _shared(places: list[Place]) -> Place:
    """The labels that all these places have in common."""
    hosts, racks = {place.host for place in places}, {place.rack for place in places}
    return Place(host=hosts.pop() if len(hosts) == 1 else "", rack=racks.pop() if len(racks) == 1 else "")
