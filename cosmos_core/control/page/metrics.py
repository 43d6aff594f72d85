"""A snapshot for Prometheus, in its text format: names begin with `cosmos_`, and of counters end with `_total`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Final

from cosmos_core.control.live.snapshot import Snapshot

MEDIA_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

Labels = Mapping[str, str]
Series = tuple[Labels, float | None]
_Family = tuple[str, str, float | Iterable[Series] | None]
"""A name, what it is, and its value or several with their labels."""


def render(snapshot: Snapshot, *, num_clients: int) -> str:
    """The metrics of a run and its page."""
    page = ("cosmos_page_clients", "Browsers that watch the page.", num_clients)
    families = (*_progress(snapshot), *_prompts(snapshot), *_replicas(snapshot), page)
    return "".join(_text(*family) for family in families)


def _progress(snapshot: Snapshot) -> Iterable[_Family]:
    about = {"run": snapshot.name, "run_id": snapshot.run_id, "stage": snapshot.stage, "phase": snapshot.phase}
    rates = (("policy", snapshot.policy_units_per_s), ("rollout", snapshot.rollout_units_per_s))
    paces = [({"pool": pool}, rate) for pool, rate in rates]
    parts = [({"reward": name}, value) for name, value in snapshot.rewards.items()]
    yield "cosmos_run_info", "What runs; always 1.", [(about, 1)]
    yield "cosmos_snapshot_timestamp_seconds", "When these figures were taken.", snapshot.time
    yield "cosmos_controller_term", "Starts of the controller.", snapshot.term
    yield "cosmos_step", "Steps done, the warm-up's included.", snapshot.step
    yield "cosmos_steps_planned", "Steps of the whole run.", snapshot.num_steps
    yield "cosmos_weight_version", "Weights that rollout replicas shall have.", snapshot.version
    yield "cosmos_generation", "Number of the newest gradient group.", snapshot.generation
    yield "cosmos_reward", "Mean reward of the newest steps.", snapshot.reward
    yield "cosmos_reward_part", "Mean of each of several rewards in the newest steps, unweighted.", parts
    yield "cosmos_loss", "Loss of the newest step.", snapshot.loss
    yield "cosmos_mismatch_kl", "KL between engine and trainer at the same weights.", snapshot.mismatch
    yield "cosmos_heldout_accuracy", "Held-out accuracy, newest.", snapshot.accuracy
    yield "cosmos_heldout_reward", "Held-out reward of videos, newest.", snapshot.heldout_reward
    yield "cosmos_units_per_second", "Units (tokens, or denoising steps) that a pool processes.", paces


def _prompts(snapshot: Snapshot) -> Iterable[_Family]:
    queue = snapshot.queue
    places = [({"place": each}, getattr(queue, each)) for each in ("queued", "in_flight", "finished", "batched")]
    dropped = [({"reason": reason}, count) for reason, count in sorted(queue.dropped.items())]
    ages = [({"staleness": str(age)}, count) for age, count in snapshot.staleness.items()]
    yield "cosmos_prompts", "Prompts of the stage by where they are.", places
    yield "cosmos_prompts_consumed_total", "Prompts trained on.", queue.consumed
    yield "cosmos_prompts_dropped_total", "Prompts dropped.", dropped
    yield "cosmos_recent_samples", "Samples of the newest steps by the steps that their weights lagged.", ages


def _replicas(snapshot: Snapshot) -> Iterable[_Family]:
    present = [replica for replica in snapshot.replicas if replica.status != "lost"]
    counted = ((role, *each) for role, counts in snapshot.statuses.items() for each in counts.items())
    states = [({"role": role, "state": status}, count) for role, status, count in counted]
    held = [({"replica": each.name, "role": each.role}, each.step) for each in present]
    told = [({"replica": each.name, "name": name}, value) for each in present for name, value in each.gauges.items()]
    refused = snapshot.refused
    yield "cosmos_replicas", "Replicas by what they do.", states
    yield "cosmos_replica_weight_version", "The step whose weights a replica holds; -1 before it has any.", held
    yield "cosmos_replica_gauge", "All that a replica tells of itself, such as mfu and memory_bytes.", told
    yield "cosmos_refused_total", "Connections, messages and processes that were not let in.", refused


def _text(name: str, words: str, values: float | Iterable[Series] | None) -> str:
    series = values if isinstance(values, Iterable) else [({}, values)]
    known = [f"{name}{_labels(labels)} {_number(value)}" for labels, value in series if value is not None]
    if not known:
        return ""
    kind = "counter" if name.endswith("_total") else "gauge"
    return "\n".join([f"# HELP {name} {words}", f"# TYPE {name} {kind}", *known, ""])


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
