"""Invariants that hold after every event. Checking costs time in proportion to what is live, never to what was."""

from __future__ import annotations

from collections.abc import Iterator

from cosmos_core.control.machine import relays
from cosmos_core.control.machine.batch_assembly import is_stale
from cosmos_core.control.machine.directives import Offers
from cosmos_core.control.machine.dispatch import load
from cosmos_core.control.machine.ledger import Ledger
from cosmos_core.control.machine.publication import retained
from cosmos_core.control.machine.state import State


def check(state: State) -> None:
    """Check the accounting of a run; the AssertionError names every invariant that is broken."""
    broken = [
        *(f"stage {index}: {problem}" for index, ledger in enumerate(state.ledgers) for problem in _ledger(ledger)),
        *_leases(state),
        *_training(state),
        *_evaluations(state),
        *_weights(state),
        *_relays(state),
    ]
    if broken:
        raise AssertionError(f"at step {state.step}: " + "; ".join(broken))


def _ledger(ledger: Ledger) -> Iterator[str]:
    live = [*ledger.queued, *ledger.in_flight, *ledger.finished, *ledger.batched]
    if len(set(live)) != len(live):
        yield f"positions are in two places: {sorted(p for p in live if live.count(p) > 1)}"
    if live and max(live) >= ledger.next_position:
        yield f"position {max(live)} is live but was never given out"
    total = len(live) + ledger.consumed + ledger.num_dropped
    if total != ledger.next_position:
        yield f"{ledger.next_position} prompts given out, {total} accounted for"
    samples = ledger.samples
    accounted = samples.consumed + sum(samples.dropped.values()) + ledger.num_held
    if samples.generated != accounted:
        yield f"{samples.generated} samples generated, {accounted} accounted for"


def _leases(state: State) -> Iterator[str]:
    leased: list[int] = []
    for replica in state.replicas.values():
        training = [lease for lease in replica.leases.values() if lease.purpose == "train"]
        leased += [lease.position for lease in training]
        if len(training) != replica.num_training:
            yield f"{replica.name} has {len(training)} training leases, counted {replica.num_training}"
        most = (state.settings.capacity - 1) * state.settings.rollout_group_size
        if replica.role == "rollout" and replica.name not in state.spare and load(state, replica) <= most:
            yield f"{replica.name} has room, and would not be given anything"
    if sorted(leased) != (in_flight := sorted(state.ledger.in_flight)):
        yield f"leases of {sorted(leased)} are not what is in flight, {in_flight}"
    groups = [*state.ledger.finished.values(), *state.ledger.batched.values()]
    held = {group.lease for group in groups if group.holder in state.replicas}
    holding = [lease for replica in state.replicas.values() for lease in replica.held]
    # A group whose holder was replaced by a process of the same name is held by nobody.
    if not held.issuperset(holding) or len(set(holding)) != len(holding):
        yield f"replicas hold payloads of leases {sorted(holding)}, wanted are {sorted(held)}"


def _training(state: State) -> Iterator[str]:
    running, ledger = state.running, state.ledger
    if state.outcome and running is None:
        return
    if (running is None) != (not ledger.batched):
        yield f"{len(ledger.batched)} prompts are batched, but the running step is {running and running.order.step}"
    if running is None:
        return
    order = running.order
    if order.step != state.step + 1:
        yield f"step {order.step} is running after step {state.step}"
    if [group.position for group in order.groups] != sorted(ledger.batched):
        yield "the running step's groups are not the batched ones"
    if sorted(index for share in order.shares for index in share) != list(range(len(order.groups))):
        yield f"shares {order.shares} do not part {len(order.groups)} groups"
    if state.stage.uses_rollouts and any(is_stale(state, group) for group in ledger.batched.values()):
        yield "a batched group is older than sync.max_staleness allows"
    if (recorded := sum(ledger.totals.steps for ledger in state.ledgers)) != state.step:
        yield f"the stages' totals are of {recorded} steps, and {state.step} are done"
    # After the run was taken back, the record of the newest step may be one of those that are left out.
    if state.steps and state.steps[-1].step > state.step:
        yield f"there is a record of step {state.steps[-1].step}, and {state.step} are done"


def _evaluations(state: State) -> Iterator[str]:
    versions = [due.version for due in state.pending]
    if versions != sorted(set(versions)):
        yield f"pending evaluations are out of order: {versions}"
    leased: dict[int, list[int]] = {}
    for replica in state.replicas.values():
        for lease in replica.leases.values():
            if lease.purpose == "evaluation":
                leased.setdefault(lease.version, []).append(lease.row)
    for due in state.pending:
        rows = sorted([*due.queued, *due.in_flight, *due.results])
        if rows != list(range(state.settings.evaluation_prompts)):
            yield f"rows of evaluation {due.version} are not each in one place"
        if sorted(leased.get(due.version, [])) != sorted(due.in_flight):
            yield f"held-out leases of evaluation {due.version} are not what is in flight"


def _weights(state: State) -> Iterator[str]:
    if state.targets != sorted(set(state.targets)):
        yield f"weight targets go back: {state.targets}"
    if state.target > state.step:
        yield f"the weight target {state.target} is ahead of step {state.step}"
    for replica in state.replicas.values():
        if replica.role == "rollout" and replica.version > state.target:
            yield f"{replica.name} runs version {replica.version}, beyond the target {state.target}"


def _indices(state: State) -> Iterator[str]:
    """True if what is kept to find replicas quickly is what a look at all of them finds."""
    for role, names in state.members.items():
        if names != {each.name for each in state.replicas.values() if each.role == role}:
            yield f"the {role} replicas are said to be {sorted(names)}"
    held = {(each.version, each.name) for each in state.named("rollout")}
    if {(version, name) for version, names in state.holders.items() for name in names} != held:
        yield f"versions are said to be held by {state.holders}, they are by {sorted(held)}"
    placed = {(state.parents.get(each.name, ""), each.name) for each in relays.afar(state)}
    if {(above, name) for above, names in state.readers.items() for name in names} != placed:
        yield f"readers are said to be {state.readers}, they are {sorted(placed)}"


def _relays(state: State) -> Iterator[str]:
    rollouts, newest = state.named("rollout"), state.target
    yield from _indices(state)
    if not {*state.parents, *state.parents.values()} <= {each.name for each in rollouts}:
        yield f"the tree {state.parents} has others than the rollout replicas"
        return
    served = {(version, endpoint) for each in rollouts for version, endpoint in each.kept.items()}
    for name, place in relays.policy_places(state):
        served |= {(version, place.process) for version, known in state.published.items() if name in known.sources}
    offers = Offers(state)
    for replica in rollouts:
        target, relaying = offers.target(replica), offers.relaying(replica, retained(state))
        for each in filter(None, (target, relaying.reserve)):
            lacking = [source for source in each.sources if (each.version, source) not in served]
            if lacking or not each.sources:
                yield f"{replica.name} shall read version {each.version} from {lacking}, where it is not"
        if target is not None and (target.version > newest or set(target.sources) & set(replica.kept.values())):
            yield f"{replica.name} shall read version {target.version} of {newest} from {target.sources}"
        if replica.kept and (replica.is_doubted or not relaying.keep or min(replica.kept) < relaying.retain):
            yield f"{replica.name} keeps the versions {sorted(replica.kept)} for nobody"
        if replica.kept.keys() - state.published.keys():
            yield f"{replica.name} keeps {sorted(replica.kept)}, known are {sorted(state.published)}"
        readers = list(state.parents.values()).count(replica.name)
        if readers and readers > state.settings.sync_fan_out:
            yield f"{readers} replicas read from {replica.name}"
