"""Which rollout replica reads weights from which: those that have a version pass it on, in a tree below the policy.

The tree follows the membership. A replica whose last weights were refused is not in it, and neither is one that maps
the policy's own copy; these read from the policy. What a replica reads from was reported to hold the version with the
published digest; whoever waits for a parent is told of the policy, too, as only it knows how long it has waited.
"""

from __future__ import annotations

from collections.abc import Iterator

from cosmos_core.controller.state import Replica, State
from cosmos_core.transport.messages import Relaying, WeightTarget
from cosmos_core.transport.places import parted
from cosmos_core.weights.planning import tree
from cosmos_core.weights.planning.topology import Place, distances


def arrange(state: State) -> None:
    """Fit the tree to the members; a replica that nobody reads from any more drops its copies."""
    if not state.settings.fan_out:
        return
    policies = policy_places(state)
    replicas = [each for each in state.named("rollout") if not each.is_doubted and not _maps(state, each, policies)]
    places = [Place(host=each.host, rack=each.rack) for each in replicas]
    found = tree.parents(places, _shared([place for _, place in policies]), state.settings.fan_out)
    parents = {
        replica.name: replicas[parent].name
        for replica, parent in zip(replicas, found, strict=True)
        if parent != tree.ORIGIN
    }
    if parents != state.parents:
        state.parents = parents
        state.touch("rollout")
    for replica in state.named("rollout"):
        if not passes_on(state, replica):
            replica.kept.clear()


def passes_on(state: State, replica: Replica) -> bool:
    """Whether others read from this replica, or may soon: until all have joined, nobody knows who will."""
    is_filling = not state.has_rollouts and state.settings.num_rollouts > state.settings.fan_out > 0
    return (is_filling and not replica.is_doubted) or replica.name in state.parents.values()


def touch_below(state: State, name: str) -> None:
    """Note that the directives of those below a replica may have changed."""
    below = {name}
    # A parent comes after its child in the worst case, so that each pass finds at least one level.
    while more := {child for child, parent in state.parents.items() if parent in below} - below:
        below |= more
    state.touched |= below


def target_of(state: State, replica: Replica) -> WeightTarget | None:
    """What a rollout replica shall load, nearest source first; None while nobody can serve it."""
    newest = state.target
    for parent in _above(state, replica):
        if newest in parent.kept:
            return _relayed(state, newest, parent)
        if parent.version < newest:
            # It is behind, and will have the newest; what it has is better than nothing new meanwhile.
            version = max(parent.kept, default=-1)
            return _relayed(state, version, parent) if version > replica.version else None
    return published_target(state, replica)


def published_target(state: State, replica: Replica) -> WeightTarget | None:
    """The newest target, from the policy; None while no policy replica can serve it."""
    known = state.published.get(state.target)
    if known is None or not known.sources:
        return None
    found = [each for each in policy_places(state) if each[0] in known.sources]
    far = distances([place for _, place in found], [Place(host=replica.host, rack=replica.rack)])[:, 0].tolist()
    order = sorted(range(len(found)), key=lambda index: far[index])
    return WeightTarget(
        version=state.target,
        digest=known.digest,
        sources=tuple(found[index][1].process for index in order),
        hosts=tuple(found[index][1].host for index in order),
        racks=tuple(found[index][1].rack for index in order),
    )


def relaying_of(state: State, replica: Replica, retained: int) -> Relaying:
    """A rollout replica's place in the tree; policy replicas retain versions from `retained` on."""
    level = sum(1 for _ in _above(state, replica))
    keep = passes_on(state, replica)
    return Relaying(
        level=level,
        reserve=published_target(state, replica) if level else None,
        keep=keep,
        retain=retained if keep else state.target + 1,
    )


def _relayed(state: State, version: int, source: Replica) -> WeightTarget:
    return WeightTarget(
        version=version,
        digest=state.published[version].digest,
        sources=(source.kept[version],),
        hosts=(source.host,),
        racks=(source.rack,),
    )


def _above(state: State, replica: Replica) -> Iterator[Replica]:
    """Those between a replica and the policy, the nearest first."""
    name = state.parents.get(replica.name)
    while name is not None:
        yield state.replicas[name]
        name = state.parents.get(name)


def policy_places(state: State) -> list[tuple[str, Place]]:
    """Name of the replica and place of each process of the policy; `process` is its endpoint, which is unique."""
    return [
        (replica.name, Place(process=place.endpoint, host=place.host, rack=place.rack or replica.rack))
        for replica in state.named("policy")
        for place in parted(replica.endpoints.get("weights", ""), replica.host)
    ]


def _maps(state: State, replica: Replica, policies: list[tuple[str, Place]]) -> bool:
    """Whether a whole policy replica is on this one's host, so that it maps its copy."""
    hosts: dict[str, set[str]] = {}
    for name, place in policies:
        hosts.setdefault(name, set()).add(place.host)
    return state.settings.shares_memory and {replica.host} in hosts.values()


def _shared(places: list[Place]) -> Place:
    """What all these places have in common."""
    hosts, racks = {place.host for place in places}, {place.rack for place in places}
    return Place(host=hosts.pop() if len(hosts) == 1 else "", rack=racks.pop() if len(racks) == 1 else "")
