"""Where the time of each pool went, by plane: what replicas measured, under names for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from cosmos_core.control.live.timeline import TimedStep
from cosmos_core.run.following.follower import Follower

Planes = dict[str, dict[str, float]]
"""{pool: {activity: seconds}}."""

_POLICY: Final[Mapping[str, tuple[str, ...]]] = {
    "training": ("pack_s", "forward_backward_s", "optimizer_s"),
    "sample fetch": ("fetch_s",),
    "gradient exchange": ("reduce_s",),
    "weight publish": ("publish_s",),
    "held-out loss": ("heldout_s",),
    "waiting for samples": ("wait_s",),
}
"""Activity to the step metrics that it is the sum of; of several replicas, a metric is the slowest one's."""

_ROLLOUT: Final[Mapping[str, str]] = {
    "generation": "busy_s",
    "scoring (summed over concurrent requests)": "scoring_s",
    "weight load": "transfer_s",
    "paused for weights": "paused_s",
}
"""Activity to the gauge that counts it."""


def planes_of(follower: Follower, gauges: Mapping[str, Mapping[str, float]]) -> Planes:
    """Seconds by activity of each pool in this session (since the run was started or resumed last).

    The policy's are summed over steps, the rollout's are the mean of its replicas, the warm-up's waiting included.

    Args:
        follower: All that happened.
        gauges: Last gauges of each replica of this session.
    """
    found: Planes = {}
    rollouts = [(name, numbers) for name, numbers in gauges.items() if name.startswith("rollout-")]
    if rollouts:
        found["rollout"] = _rollout(rollouts, follower)
    begin = follower.sessions[-1][0] if follower.sessions else 0.0
    steps = [timed for timed in follower.steps if timed.time >= begin and "wait_s" in timed.record.metrics]
    if steps:
        found["policy"] = _policy(steps)
    return {pool: {name: round(value, 3) for name, value in parts.items()} for pool, parts in found.items()}


def _policy(steps: Sequence[TimedStep]) -> dict[str, float]:
    return {
        activity: sum(timed.record.metrics.get(name, 0.0) for timed in steps for name in names)
        for activity, names in _POLICY.items()
    }


def _rollout(replicas: Sequence[tuple[str, Mapping[str, float]]], follower: Follower) -> dict[str, float]:
    count = len(replicas)
    parts = {
        activity: sum(numbers.get(gauge, 0.0) for _, numbers in replicas) / count
        for activity, gauge in _ROLLOUT.items()
    }
    end = follower.sessions[-1][1] if follower.sessions else 0.0
    present = sum(max(0.0, end - follower.timeline.joined.get(name, end)) for name, _ in replicas) / count
    parts["waiting for prompts"] = max(0.0, present - parts["generation"] - parts["paused for weights"])
    return parts
