"""A run at one moment, as an immutable record that any thread may read, and that becomes JSON as it stands."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final, Literal, TypeAlias

import attrs

from cosmos_core.config.job import Stage
from cosmos_core.control.live.diagnosis import Finding, findings
from cosmos_core.control.live.event_feed import Curve, EventFeed, News, SampleView
from cosmos_core.control.live.figures import NEWEST_STEPS, Gauges, Timeline, figures
from cosmos_core.control.machine import changes, turns
from cosmos_core.control.machine.records import EvaluationRecord, SettingChange
from cosmos_core.control.machine.recovery import since_recovery
from cosmos_core.control.machine.state import Replica, State
from cosmos_core.observe.live import Progress

MOST_REPLICAS: Final = 200
"""Shown one by one; of more, the counts by state say how the others are."""

ReplicaStatus: TypeAlias = Literal[
    "joined", "asleep", "loading", "generating", "idle", "forming", "training", "waiting", "draining", "lost"
]
"""What a replica is doing.

`asleep`: the other pool has the GPUs. `joined`: it has no weights yet. `loading`: newer weights. `generating`: it has
prompts in flight; `idle`: none. `forming`: it becomes a member of the gradient group. `training`: the running step.
`waiting`: for a batch. `draining`: it finishes what it has begun, and leaves. `lost`: it left, or was given up.
"""


@attrs.frozen(kw_only=True)
class ReplicaView:
    """A replica.

    Attributes:
        role: `policy` or `rollout`; empty of one that was lost.
        step: The step whose weights it holds; -1 before it has any.
        detail: Why it was lost.
        gauges: All that it tells of itself; a rollout replica, `units_per_s`, units that it generates per second.
    """

    name: str
    role: str
    status: ReplicaStatus
    step: int = -1
    in_flight: int = 0
    place: str = ""
    detail: str = ""
    gauges: Mapping[str, float] = attrs.field(factory=dict)


@attrs.frozen(kw_only=True)
class Queue:
    """Prompts of the present stage, each in exactly one place."""

    queued: int
    in_flight: int
    finished: int
    batched: int
    consumed: int
    dropped: dict[str, int]
    held_back: int
    """How many prompts fewer than `sync.max_staleness` allows are given out, because some were dropped as stale."""
    wasted: float
    """Share of all units that were generated for samples which were dropped."""


@attrs.frozen(kw_only=True)
class Snapshot(Progress):
    """A run at one moment: its figures, and what is shown beside them.

    Attributes:
        term: Starts of the controller since the run began, or was recovered.
        outcome: How it ended; empty while it goes on.
        version: The weight version that rollout replicas shall have; -1: none yet.
        generation: Gradient groups that were formed since the run began, or was recovered.
        replicas: The first `MOST_REPLICAS`, by role and name, then those that were lost.
        staleness: Samples of the newest steps by how many steps their weights lagged.
        rewards: Of these steps, the mean of each of several rewards, unweighted; empty where there is one.
        mismatch: KL between what the engine and the trainer make of the same weights, of the newest step.
        settings: Dynamic keys that were changed, with the newest value and the first step of it.
        refused: What was not let in so far: connections, messages and processes.
        samples: What the model made lately, newest last; not escaped.
        findings: All that explains, now, why the run does not learn.
        heldout: The newest evaluation of which samples are kept, with these; not escaped. None without one.
    """

    time: float
    name: str
    run_id: str
    term: int
    outcome: str
    reason: str
    version: int
    versions: dict[int, int]
    generation: int
    members: tuple[str, ...]
    statuses: dict[str, dict[str, int]]
    replicas: tuple[ReplicaView, ...]
    queue: Queue
    staleness: dict[int, int]
    loss: float | None
    mismatch: float | None
    settings: dict[str, str]
    refused: int
    news: tuple[News, ...]
    samples: tuple[SampleView, ...]
    curves: tuple[Curve, ...]
    rewards: dict[str, float] = attrs.field(factory=dict)
    heldout: EvaluationRecord | None = None
    findings: tuple[Finding, ...] = ()


def take(
    state: State,
    feed: EventFeed,
    timeline: Timeline,
    stages: tuple[Stage, ...],
    gauges: Gauges,
    *,
    name: str,
    now: float,
    is_running: bool = True,
) -> Snapshot:
    """Take a snapshot; the feed is caught up with the state first. Gauges of the controller are under `controller`."""
    feed.catch_up(state, now)
    shown = figures(state, timeline, stages, gauges, now=now if is_running else None)
    statuses = {replica.name: status_of(state, replica) for replica in state.replicas.values()}
    lost = (ReplicaView(name=each.name, role="", status="lost", detail=each.reason) for each in feed.lost)
    rollouts = [replica for replica in state.replicas.values() if replica.role == "rollout"]
    return Snapshot(
        **attrs.asdict(shown, recurse=False),
        time=now,
        name=name,
        run_id=state.settings.run_id,
        term=since_recovery(state.term),
        outcome=state.outcome,
        reason=state.reason,
        version=state.target,
        versions=dict(sorted(Counter(replica.version for replica in rollouts).items())),
        generation=since_recovery(state.generation_number),
        members=state.generation.order.members if state.generation is not None else (),
        statuses=_counted(state, statuses),
        replicas=(*_shown(state, statuses, gauges), *lost),
        queue=_queue(state),
        staleness=feed.staleness(),
        loss=_newest_metric(state, "loss"),
        mismatch=_newest_metric(state, "mismatch_kl"),
        settings={change.key: _since(state, change) for change in state.changes},
        refused=int(sum(value for name, value in gauges.get("controller", {}).items() if name.endswith("_refused"))),
        news=tuple(feed.news),
        samples=tuple(feed.samples),
        curves=feed.curves(),
        rewards=_rewards(state),
        findings=findings(state),
        heldout=next((done for done in reversed(state.evaluations) if done.completions), None),
    )


def status_of(state: State, replica: Replica) -> ReplicaStatus:
    """The status of a replica, as far as the controller knows."""
    if replica.name in state.draining:
        return "draining"
    if not turns.may_wake(state, replica.role):
        return "asleep"
    if replica.role == "policy":
        return _policy_status(state, replica)
    if replica.version < state.target:
        return "loading"
    if replica.version < 0:
        return "joined"
    return "generating" if replica.leases else "idle"


def _policy_status(state: State, replica: Replica) -> ReplicaStatus:
    generation, running = state.generation, state.running
    if generation is None or replica.name not in generation.order.members:
        return "joined"
    if not generation.is_ready:
        return "forming"
    return "training" if running is not None and replica.name not in running.done else "waiting"


def _counted(state: State, statuses: Mapping[str, ReplicaStatus]) -> dict[str, dict[str, int]]:
    counted: dict[str, Counter[str]] = {}
    for name, status in statuses.items():
        counted.setdefault(state.replicas[name].role, Counter())[status] += 1
    return {role: dict(sorted(found.items())) for role, found in sorted(counted.items())}


def _shown(state: State, statuses: Mapping[str, ReplicaStatus], gauges: Gauges) -> Iterable[ReplicaView]:
    replicas = sorted(state.replicas.values(), key=lambda replica: (replica.role, len(replica.name), replica.name))
    for replica in replicas[:MOST_REPLICAS]:
        yield ReplicaView(
            name=replica.name,
            role=replica.role,
            status=statuses[replica.name],
            step=replica.step if replica.role == "policy" else replica.version,
            in_flight=len(replica.leases),
            place=f"pid {replica.pid} on {replica.host}",
            gauges=gauges.get(replica.name, {}),
        )


def _queue(state: State) -> Queue:
    ledger = state.ledger
    return Queue(
        queued=len(ledger.queued),
        in_flight=len(ledger.in_flight),
        finished=len(ledger.finished),
        batched=len(ledger.batched),
        consumed=ledger.consumed,
        dropped=dict(ledger.dropped),
        held_back=state.held_back,
        wasted=ledger.samples.wasted / max(1, ledger.samples.units),
    )


def _since(state: State, change: SettingChange) -> str:
    return f"{change.after} from step {changes.first_step(state.settings, change.key, change.step)} on"


def _rewards(state: State) -> dict[str, float]:
    """Means of the newest steps' rewards, of several."""
    found: dict[str, list[float]] = {}
    for record in state.steps[-NEWEST_STEPS:]:
        for name, value in record.rewards.items():
            found.setdefault(name, []).append(value)
    return {name: sum(values) / len(values) for name, values in found.items()} if len(found) > 1 else {}


def _newest_metric(state: State, name: str) -> float | None:
    return state.steps[-1].metrics.get(name) if state.steps else None
