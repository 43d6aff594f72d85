"""Snapshots of a run that nobody runs, for tests of what shows them."""

from __future__ import annotations

import attrs

from cosmos_core.control.live.event_feed import Curve, News, SampleView
from cosmos_core.control.live.snapshot import Queue, ReplicaView, Snapshot

_SNAPSHOT = Snapshot(
    time=1000.0,
    name="arithmetic",
    run_id="run-1",
    term=1,
    phase="training",
    outcome="",
    reason="",
    stage="grpo",
    step=3,
    num_steps=9,
    elapsed_s=65.0,
    eta_s=130.0,
    version=3,
    versions={2: 1, 3: 1},
    generation=1,
    members=("policy-0",),
    statuses={"policy": {"training": 1}, "rollout": {"generating": 1, "loading": 1}},
    replicas=(
        ReplicaView(name="policy-0", role="policy", status="training", step=3, place="pid 1 on host"),
        ReplicaView(
            name="rollout-0", role="rollout", status="generating", step=3, in_flight=5, gauges={"units_per_s": 120.5}
        ),
        ReplicaView(name="rollout-1", role="rollout", status="loading", step=2, gauges={"units_per_s": 80.0}),
        ReplicaView(name="rollout-2", role="", status="lost", detail="silent for 15 s"),
    ),
    queue=Queue(
        queued=1, in_flight=5, finished=2, batched=4, consumed=12, dropped={"stale": 3}, held_back=1, wasted=0.125
    ),
    staleness={0: 10, 1: 6},
    reward=0.5,
    loss=0.25,
    mismatch=1e-3,
    accuracy=None,
    policy_units_per_s=1000.0,
    rollout_units_per_s=200.5,
    settings={},
    refused=0,
    news=(News(time=999.0, kind="joined", text="rollout-0"),),
    samples=(
        SampleView(time=999.0, lease=1, replica="rollout-0", version=3, status="ok", reward=1.0, units=2, text="3 + 4"),
    ),
    curves=(Curve(name="reward", points=((1.0, 0.25), (2.0, 0.5))), Curve(name="loss", points=((1.0, 1.0),))),
)


def snapshot(**changes: object) -> Snapshot:
    """One of a run in its third step of nine, with other values where they are given."""
    return attrs.evolve(_SNAPSHOT, **changes)
