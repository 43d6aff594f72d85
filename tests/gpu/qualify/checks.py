"""The stages, and the checks of each: what each takes, and what runs it. Nothing is imported to read this table."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import attrs

from tests.gpu.qualify.where import Where

ROOT: Final = Path(__file__).resolve().parents[3]
BENCHMARKS: Final = ROOT / "benchmarks"
STAGES: Final[Mapping[str, str]] = {
    "A": "kernels",
    "B": "trainer",
    "C": "engine",
    "D": "weights and checkpoints",
    "E": "runs",
    "F": "memory",
}


@attrs.frozen(kw_only=True)
class Check:
    """A part of a stage.

    Attributes:
        name: Within its stage.
        seconds: What it takes on one H200, about.
        value: 1 for what matters most where time is short, up to 3.
        call: `module.function` of this package; it tells its figures, and what it raises fails the check alone.
        settings: Its arguments, besides where it runs.
    """

    name: str
    seconds: float
    value: int
    call: str
    settings: Mapping[str, Any] = attrs.field(factory=dict)

    def measure(self, where: Where) -> None:
        """Run it."""
        module, _, function = self.call.partition(".")
        getattr(importlib.import_module(f"tests.gpu.qualify.{module}"), function)(where, self.name, **self.settings)


def _step(name: str, seconds: float, value: int, **settings: Any) -> Check:
    return Check(name=name, seconds=seconds, value=value, call="trainer.step", settings=settings)


def _rank(name: str, seconds: float, value: int, config: str, **mesh: int) -> Check:
    tiny = "qwen3-moe" if "ep" in mesh else "qwen3"
    settings = {"config": config, "tiny": tiny, "mesh": mesh, "units": 8192, "recompute": "selective"}
    return Check(name=name, seconds=seconds, value=value, call="memory.fake_rank", settings=settings)


def _engine(model: str, seconds: float, value: int, engine: str = "embedded") -> Check:
    settings = {"model": model, "engine": engine, "sequences": (1, 64, 256), "vllm": 0.5}
    return Check(name=f"{model}, {engine}", seconds=seconds, value=value, call="engine.speed", settings=settings)


def _sleep(name: str, seconds: float, value: int, **settings: Any) -> Check:
    settings = {"model": "0.6B", **settings}
    return Check(name=f"0.6B, {name}", seconds=seconds, value=value, call="engine.sleep", settings=settings)


def _publication(model: str, seconds: float, value: int, megabytes: int) -> Check:
    settings = {"megabytes": megabytes, "way": "slices, shared memory"}
    return Check(name=f"{model}, publication", seconds=seconds, value=value, call="weights.publish", settings=settings)


_LATER: Final = {"test_colocated.py", "test_engine_sleep.py", "test_lost_member.py", "test_offload.py"}
"""Tests of what needs two GPUs or vLLM, of what few recipes use, and of what a whole run does, too."""
_COMPILED: Final = {"compile": "on"}
_8B: Final = {"shape": "8B", **_COMPILED}
_SMALL: Final = {"shape": "0.6B", **_COMPILED}
_SHORT: Final = ["--set", "run.steps=2", "--set", "evaluation.prompts=8"]
_SHORT_WARMUP: Final = [*_SHORT, "--set", "warmup.steps=4"]
RUNS: Final[Mapping[str, Mapping[str, Any]]] = {
    "arithmetic": {
        "recipe": "arithmetic.toml",
        "measure": "heldout_accuracy_after",
        "least": 0.85,
        "tiny": _SHORT_WARMUP,
    },
    "arithmetic-colocated": {
        "recipe": "arithmetic.toml",
        "measure": "heldout_accuracy_after",
        "least": 0.85,
        "options": ["--set", "rollout.placement=colocated"],
        "tiny": _SHORT_WARMUP,
    },
    "sft-arithmetic": {
        "recipe": "sft-arithmetic.toml",
        "measure": "heldout_loss_after",
        "most": 0.05,
        "tiny": _SHORT,
    },
    "grpo-vision": {
        "recipe": "grpo-vision.toml",
        "measure": "heldout_accuracy_after",
        "least": 0.3,
        "tiny": _SHORT_WARMUP,
    },
    "wan-tiny-grpo-fast": {
        "recipe": "wfm/wan-tiny-grpo-fast.toml",
        "measure": "heldout_reward_after",
        "least": -0.5,
        "options": ["--reward", "colour"],
        "tiny": _SHORT_WARMUP,
    },
}
"""Whole runs; bounds lie below what a CPU reaches (benchmarks/results/presets-cpu.md)."""
CHECKS: Final[Mapping[str, Sequence[Check]]] = {
    "A": [
        Check(name=path.name, seconds=30, value=2 if path.name in _LATER else 1, call="kernels.run_file")
        for path in sorted((ROOT / "tests" / "gpu").glob("test_*.py"))
    ],
    "B": [
        _step("0.6B, compiled", 60, 1, mfu=30.0, **_SMALL),
        _step("8B, compiled", 75, 1, mfu=45.0, **_8B),
        _step("8B, compiled, float8", 75, 1, base="8B, compiled", times=1.25, **_8B, float8="rowwise"),
        _step(
            "0.6B, compiled, 500 ragged documents", 75, 2,
            base="0.6B, compiled", times=0.7, **_SMALL, is_ragged=True, tokens=32000, document=64,
        ),
        _step("0.6B, eager", 45, 3, shape="0.6B"),
        _step("8B, eager", 45, 3, shape="8B"),
    ],
    "C": [
        Check(name="0.6B, log-probs", seconds=40, value=1, call="engine.divergence", settings={"model": "0.6B"}),
        _engine("0.6B", 60, 1),
        _engine("4B", 90, 2),
        Check(name="4B, log-probs", seconds=60, value=2, call="engine.divergence", settings={"model": "4B"}),
        _sleep("vLLM after sleep, compiled", 120, 2, engine="vllm", compiles=True),
        _sleep("embedded after sleep", 60, 3, engine="embedded"),
        _sleep("vLLM after sleep, eager", 90, 3, engine="vllm"),
        _engine("0.6B", 60, 3, engine="embedded without graphs"),
        _engine("0.6B", 150, 3, engine="embedded compiled"),
    ],
    "D": [
        _publication("0.6B", 60, 1, megabytes=1200),
        _publication("8B", 90, 2, megabytes=16000),
        Check(name="0.6B, checkpoint", seconds=90, value=1, call="weights.checkpoint", settings={"shape": "0.6B"}),
    ],
    "E": [Check(name="side by side", seconds=180, value=1, call="runs.all_runs", settings={"runs": RUNS})],
    "F": [
        _rank("8B, dp_shard 8", 45, 1, "Qwen3-8B", dp_shard=8),
        _rank("32B, dp_shard 4, tp 2", 60, 1, "Qwen3-32B", dp_shard=4, tp=2),
        _rank("30B-A3B, dp_shard 8, ep 8", 75, 2, "Qwen3-30B-A3B", dp_shard=8, ep=8),
    ],
}  # fmt: skip
