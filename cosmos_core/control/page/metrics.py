"""A snapshot for Prometheus, in its text format; every name begins with `cosmos_`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Final

from cosmos_core.control.live.snapshot import Snapshot

MEDIA_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

Labels = Mapping[str, str]
Series = tuple[Labels, float | None]


def render(snapshot: Snapshot, *, num_clients: int) -> str:
    """The metrics of a run and its page."""
    found = [_family(*family) for family in (*_progress(snapshot), *_prompts(snapshot), *_replicas(snapshot))]
    found.append(_family("cosmos_page_clients", "gauge", "Browsers that watch the page.", [({}, num_clients)]))
    return "".join(found)


_Family = tuple[str, str, str, Iterable[Series]]


def _progress(snapshot: Snapshot) -> Iterable[_Family]:
    about = {"run": snapshot.name, "run_id": snapshot.run_id, "stage": snapshot.stage, "phase": snapshot.phase}
    rates = (("policy", snapshot.policy_units_per_s), ("rollout", snapshot.rollout_units_per_s))
    yield "cosmos_run_info", "gauge", "What runs; always 1.", [(about, 1)]
    yield "cosmos_snapshot_timestamp_seconds", "gauge", "When these figures were taken.", [({}, snapshot.time)]
    yield "cosmos_controller_term", "gauge", "Starts of the controller.", [({}, snapshot.term)]
    yield "cosmos_step", "gauge", "Steps done, the warm-up's included.", [({}, snapshot.step)]
    yield "cosmos_steps_planned", "gauge", "Steps of the whole run.", [({}, snapshot.num_steps)]
    yield "cosmos_weight_version", "gauge", "Weights that rollout replicas shall have.", [({}, snapshot.version)]
    yield "cosmos_generation", "gauge", "Number of the newest gradient group.", [({}, snapshot.generation)]
    yield "cosmos_reward", "gauge", "Mean reward of the newest steps.", [({}, snapshot.reward)]
    parts = [({"reward": name}, value) for name, value in snapshot.rewards.items()]
    yield "cosmos_reward_part", "gauge", "Mean of each of several rewards in the newest steps, unweighted.", parts
    yield "cosmos_loss", "gauge", "Loss of the newest step.", [({}, snapshot.loss)]
    yield "cosmos_mismatch_kl", "gauge", "KL between engine and trainer at the same weights.", [({}, snapshot.mismatch)]
    yield "cosmos_heldout_accuracy", "gauge", "Held-out accuracy, newest.", [({}, snapshot.accuracy)]
    yield "cosmos_heldout_reward", "gauge", "Held-out reward of videos, newest.", [({}, snapshot.heldout_reward)]
    yield (
        "cosmos_units_per_second",
        "gauge",
        "Units (tokens, or denoising steps) that a pool processes.",
        [({"pool": pool}, rate) for pool, rate in rates],
    )


def _prompts(snapshot: Snapshot) -> Iterable[_Family]:
    queue = snapshot.queue
    places = ("queued", "in_flight", "finished", "batched")
    yield (
        "cosmos_prompts",
        "gauge",
        "Prompts of the stage by where they are.",
        [({"place": place}, getattr(queue, place)) for place in places],
    )
    yield "cosmos_prompts_consumed_total", "counter", "Prompts trained on.", [({}, queue.consumed)]
    yield (
        "cosmos_prompts_dropped_total",
        "counter",
        "Prompts dropped.",
        [({"reason": reason}, count) for reason, count in sorted(queue.dropped.items())],
    )
    yield (
        "cosmos_recent_samples",
        "gauge",
        "Samples of the newest steps by the steps that their weights lagged.",
        [({"staleness": str(age)}, count) for age, count in snapshot.staleness.items()],
    )


def _replicas(snapshot: Snapshot) -> Iterable[_Family]:
    present = [replica for replica in snapshot.replicas if replica.status != "lost"]
    yield (
        "cosmos_replicas",
        "gauge",
        "Replicas by what they do.",
        [
            ({"role": role, "state": status}, count)
            for role, counts in snapshot.statuses.items()
            for status, count in counts.items()
        ],
    )
    yield (
        "cosmos_replica_weight_version",
        "gauge",
        "The step whose weights a replica holds; -1 before it has any.",
        [({"replica": replica.name, "role": replica.role}, replica.step) for replica in present],
    )
    yield (
        "cosmos_replica_units_per_second",
        "gauge",
        "Units (tokens, or denoising steps) that a replica generates.",
        [({"replica": replica.name}, replica.gauges.get("units_per_s")) for replica in present],
    )
    told = [({"replica": each.name, "name": name}, value) for each in present for name, value in each.gauges.items()]
    yield "cosmos_replica_gauge", "gauge", "All that a replica tells of itself, such as mfu and memory_bytes.", told
    yield (
        "cosmos_refused_total",
        "counter",
        "Connections, messages and processes that were not let in.",
        [({}, snapshot.refused)],
    )


def _family(name: str, kind: str, words: str, series: Iterable[Series]) -> str:
    known = [(labels, value) for labels, value in series if value is not None]
    if not known:
        return ""
    lines = [f"# HELP {name} {words}", f"# TYPE {name} {kind}"]
    lines += [f"{name}{_labels(labels)} {_number(value)}" for labels, value in known]
    return "\n".join(lines) + "\n"


def _labels(labels: Labels) -> str:
    if not labels:
        return ""
    escapes = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n"})
    return "{" + ",".join(f'{name}="{value.translate(escapes)}"' for name, value in labels.items()) + "}"


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(value)
