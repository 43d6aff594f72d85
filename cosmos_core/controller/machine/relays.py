"""Which rollout replica reads weights from which: those that have a version pass it on, in a tree below the policy.

The tree follows the membership. A replica whose last weights were refused is not in it, and neither is one that maps
the policy's own copy; these read from the policy. What a replica reads from was reported to hold the version with the
published digest; whoever waits for a parent is told of the policy, too, as only it knows how long it has waited.
"""

from __future__ import annotations

from collections.abc import Iterator

from cosmos_core.controller.machine.state import Replica, State
from cosmos_core.transport.places import parted
from cosmos_core.weights.planning import tree
from cosmos_core.weights.planning.topology import Place


def arrange(state: State) -> None:
    """Fit the tree to the members; a replica that nobody reads from any more drops its copies."""
    if not state.settings.fan_out:
        return
    policies = policy_places(state)
    replicas = _reading_afar(state, policies)
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
    keeping = passing(state)
    for replica in state.named("rollout"):
        if replica.name not in keeping:
            replica.kept.clear()


def passing(state: State) -> set[str]:
    """Names of those from which others read, or may soon: until all have joined, nobody knows who will."""
    found = set(state.parents.values())
    if not state.has_rollouts and state.settings.num_rollouts > state.settings.fan_out > 0:
        found |= {each.name for each in _reading_afar(state, policy_places(state))}
    return found


def touch_below(state: State, name: str) -> None:
    """Note that the directives of those below a replica may have changed."""
    below = {name}
    # A parent comes after its child in the worst case, so that each pass finds at least one level.
    while more := {child for child, parent in state.parents.items() if parent in below} - below:
        below |= more
    state.touched |= below


def above(state: State, replica: Replica) -> Iterator[Replica]:
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


def _reading_afar(state: State, policies: list[tuple[str, Place]]) -> list[Replica]:
    """Rollout replicas that take part in the tree: trusted ones that stay and do not map a copy of the policy's.

    One is mapped where a whole policy replica is on the host.
    """
    hosts: dict[str, set[str]] = {}
    for name, place in policies:
        hosts.setdefault(name, set()).add(place.host)
    mapped = {next(iter(each)) for each in hosts.values() if len(each) == 1} if state.settings.shares_memory else set()
    return [each for each in state.staying("rollout") if not each.is_doubted and each.host not in mapped]


def _shared(places: list[Place]) -> Place:
    """What all these places have in common."""
    hosts, racks = {place.host for place in places}, {place.rack for place in places}
    return Place(host=hosts.pop() if len(hosts) == 1 else "", rack=racks.pop() if len(racks) == 1 else "")
