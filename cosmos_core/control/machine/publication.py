"""Publication of weights: the versions that exist, the one that rollout replicas shall load, and those to forget."""

from __future__ import annotations

from cosmos_core.control.machine import relays
from cosmos_core.control.machine.state import Published, Replica, State
from cosmos_core.transport.reports import WeightsLoaded, WeightsPublished, WeightsRejected


def due_at_start(state: State) -> int:
    """The version that must be published before the next step, because no step before it could; -1: none."""
    settings = state.settings
    # A resumed run may start in the middle of a publication interval, and nobody holds any weights yet.
    return state.step if state.stage.uses_rollouts or settings.publishes(state.step) else -1


def on_published(state: State, replica: Replica, report: WeightsPublished) -> None:
    """A policy replica holds a version."""
    known = state.published.get(report.version)
    if known is None:
        known = state.published[report.version] = Published(digest=report.digest, nbytes=report.nbytes)
    elif known.digest != report.digest:
        state.fail(
            f"policy replicas have diverged: {replica.name} published version {report.version} with digest "
            f"{report.digest}, {', '.join(sorted(known.sources)) or 'a lost replica'} with {known.digest}; "
            "resume from the last checkpoint"
        )
        return
    known.sources.add(replica.name)
    state.touch("rollout")


def on_loaded(state: State, replica: Replica, report: WeightsLoaded) -> None:
    """A rollout replica generates with a version, if its digest is the published one."""
    known = state.published.get(report.version)
    if known is None:
        # It took so long that the version is forgotten. Nothing is wrong with it, and nothing can be generated with it.
        state.hold(replica, -1)
        relays.touch_below(state, replica.name)
        return
    if known.digest != report.digest:
        _refuse(state, replica)
        return
    state.hold(replica, report.version)
    if replica.is_doubted:
        replica.is_doubted = False
        relays.follow(state, replica.name)
    if report.endpoint and relays.passes_on(state, replica):
        replica.kept[report.version] = report.endpoint
    relays.touch_below(state, replica.name)
    _forget(state)


def on_rejected(state: State, replica: Replica, report: WeightsRejected) -> None:
    """A rollout replica loaded something else than was published: it has no weights."""
    why = f": {report.reason}" if report.reason else ""
    state.status_details["weights"] = (
        f"{replica.name}: version {report.version} loaded with digest {report.digest or 'unknown'}, not "
        f"{report.expected}{why}"
    )
    _refuse(state, replica)


def retarget(state: State) -> None:
    """Choose the version that rollout replicas shall load: the newest, but none beyond an unfinished evaluation.

    It never goes back, so an engine only ever moves forward.
    """
    newest = state.step
    if state.pending:
        newest = min(newest, state.pending[0].version)
    # A version that a replica published of a step that is not done on all of them may yet be another one's.
    candidates = [v for v, known in state.published.items() if state.target < v <= newest and known.sources]
    if candidates:
        state.targets.append(max(candidates))
        _forget(state)
        state.touch("rollout")
    elif state.publish < state.step and state.target in state.published and not state.published[state.target].sources:
        # Every replica that published it is gone; those that are left hold newer weights only.
        state.publish = state.step
        state.touch("policy")


def retained(state: State) -> int:
    """The oldest version that a rollout replica may still have to load."""
    return state.targets[0] if state.targets else max(state.publish, 0)


def drop_source(state: State, name: str) -> None:
    """A policy replica is gone, and its snapshots with it."""
    for known in state.published.values():
        known.sources.discard(name)
    # A step that it alone had applied is repeated by the others, and comes out with other numbers.
    for version in [v for v, known in state.published.items() if v > state.step and not known.sources]:
        del state.published[version]
    state.touch("rollout")


def _refuse(state: State, replica: Replica) -> None:
    state.hold(replica, -1)
    replica.rejections += 1
    # Whatever made them wrong, nobody shall have any weights from it.
    replica.kept.clear()
    relays.touch_below(state, replica.name)
    if not replica.is_doubted:
        replica.is_doubted = True
        relays.follow(state, replica.name)


def _forget(state: State) -> None:
    """Forget versions that nobody can be loading any more, or that would be too old to generate with."""
    settings = state.settings
    oldest = min(state.holders, default=state.target)
    # Policy replicas keep a copy of the weights for each target: one replica that never loads must not fill the host.
    num_old = max(0, len(state.targets) - settings.sync_max_staleness // settings.sync_interval - 2)
    # A replica may be loading the first target after the version it has, or any later one; by changes of what it has.
    needed = oldest if settings.sync_delta else oldest + 1
    while num_old < len(state.targets) - 1 and state.targets[num_old] < needed:
        num_old += 1
    if num_old:
        del state.targets[:num_old]
        for version in [v for v in state.published if v < state.targets[0]]:
            del state.published[version]
        for replica in state.replicas.values():
            for version in [v for v in replica.kept if v < state.targets[0]]:
                del replica.kept[version]
        state.touch("policy")
        state.touched.update(state.readers.keys() & state.replicas.keys())
