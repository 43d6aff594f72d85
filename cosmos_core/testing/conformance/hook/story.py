"""What lifecycle hooks are told, in the order in which a run tells it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import attrs

from cosmos_core.config.schema import Recipe
from cosmos_core.config.structure import structure, unstructure
from cosmos_core.protocols import RunInfo
from cosmos_core.types import JSON

_RECIPE: Final[Mapping[str, JSON]] = {
    "run": {"name": "kit", "steps": 3},
    "model": {"config": {"model_type": "qwen3", "layer_types": ["full_attention"]}},
    "algorithm": {"plugin": "grpo"},
    "dataset": {"plugin": "arithmetic", "options": {"max_operand": 9}},
    "reward": [{"plugin": "math"}, {"plugin": "brevity", "weight": 0.5}],
}


@attrs.frozen(kw_only=True)
class Call:
    """One call of a lifecycle hook; `run` is added to its arguments."""

    hook: str
    arguments: Mapping[str, Any] = attrs.field(factory=dict)


def run_info(directory: Path, name: str, *, resumed_from: int | None = None) -> RunInfo:
    """A run with a complete recipe."""
    recipe = unstructure(structure(_RECIPE, Recipe))
    recipe["run"]["name"] = name
    return RunInfo(run_id=f"{name}-1a2b", name=name, directory=directory, recipe=recipe, resumed_from=resumed_from)


def beginning() -> Iterator[Call]:
    """Up to the first weights."""
    yield Call(hook="cosmos_run_started")
    for role in ("policy", "rollout"):
        yield Call(hook="cosmos_replica_joined", arguments={"replica": f"{role}-0", "role": role})
    yield Call(hook="cosmos_weights_published", arguments={"version": 0, "digest": "0f" * 16})
    yield _evaluated(0, 0.125)


def steps(first: int, last: int, *, accuracy: float = 0.25) -> Iterator[Call]:
    """Some training steps, an evaluation and a checkpoint."""
    for step in range(first, last + 1):
        metrics = {
            "train/loss": 1.0 / step,
            "train/lr": 1e-3,
            "reward/mean": 0.5,
            "batch/samples": 8,
            "staleness/max": 1,
        }
        yield Call(hook="cosmos_step_finished", arguments={"step": step, "metrics": metrics})
        yield Call(hook="cosmos_weights_published", arguments={"version": step, "digest": f"{step:032x}"})
    yield _evaluated(last, accuracy)
    yield Call(hook="cosmos_checkpoint_saved", arguments={"step": last, "path": f"checkpoints/step-{last}"})


def ending(outcome: str, *, accuracy: float | None = 0.25) -> Iterator[Call]:
    """The end of a run."""
    left = {"replica": "rollout-0", "role": "rollout", "reason": "stopped"}
    yield Call(hook="cosmos_replica_left", arguments=left)
    summary: dict[str, JSON] = {
        "outcome": outcome,
        "reason": "" if outcome == "finished" else "the controller was lost",
        "steps": 3,
        "wall_s": 12.5,
        "heldout_accuracy_after": accuracy,
        "evaluations": [] if accuracy is None else [{"step": 3, "accuracy": accuracy}],
        "samples": {"generated": 24, "dropped": {}},
    }
    yield Call(hook="cosmos_run_ended", arguments={"outcome": outcome, "summary": summary})


def oddities() -> Iterator[Call]:
    """What is rare and allowed: numbers that are none, nothing at all, names from all over the world."""
    for key, before, after in (
        ("policy.optimizer.lr", 1e-6, 0.0),
        ("algorithm.options.dual_clip", None, 3),
        ("algorithm.options.größe 大きさ", "a", "y" * 10_000),
        ("algorithm.options.dynamic_sampling", True, False),
    ):
        yield Call(hook="cosmos_setting_changed", arguments={"step": 4, "key": key, "before": before, "after": after})
    rare = {"train/loss": math.nan, "train/gradient_norm": math.inf, "reward/mean": -math.inf, "train/steps": 2**60}
    for step, metrics in enumerate(
        ({}, rare, {"reward/größe — 大きさ 🙂": 1.0, "a b?#%'\"/..": 0.0}, {"x" * 400: 1e-300}), 4
    ):
        yield Call(hook="cosmos_step_finished", arguments={"step": step, "metrics": metrics})
        yield Call(hook="cosmos_evaluation_finished", arguments={"step": step, "metrics": metrics})
    yield Call(hook="cosmos_step_finished", arguments={"step": 10**12, "metrics": {"train/loss": 0.0}})
    yield Call(hook="cosmos_replica_joined", arguments={"replica": "rollout-größe", "role": "rollout"})
    yield Call(
        hook="cosmos_replica_left",
        arguments={"replica": "policy-0", "role": "policy", "reason": "lost: “keine Antwort”\n" + "y" * 10_000},
    )
    yield Call(hook="cosmos_checkpoint_saved", arguments={"step": 7, "path": "s3://bucket/a folder/ü/step-7"})


def _evaluated(step: int, accuracy: float) -> Call:
    metrics = {"heldout/accuracy": accuracy, "heldout/unscored": 0, "heldout/reward": accuracy}
    return Call(hook="cosmos_evaluation_finished", arguments={"step": step, "metrics": metrics})
