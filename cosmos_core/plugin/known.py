"""First-party plugins and the distributions that provide them, for the hint when one is not installed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from cosmos_core.protocols import Kind

KNOWN: Final[Mapping[tuple[Kind, str], str]] = {
    ("model", "llama"): "cosmos-model-llama",
    ("model", "llama2"): "cosmos-model-llama",
    ("model", "qwen"): "cosmos-model-qwen",
    ("model", "qwen-vl"): "cosmos-model-qwen-vl",
    ("model", "qwen3-moe"): "cosmos-model-moe",
    ("model", "deepseek"): "cosmos-model-moe",
    ("model", "moonlight"): "cosmos-model-moe",
    ("algorithm", "grpo"): "cosmos-algorithm-grpo",
    ("algorithm", "dr-grpo"): "cosmos-algorithm-grpo",
    ("algorithm", "dapo"): "cosmos-algorithm-grpo",
    ("algorithm", "sft"): "cosmos-algorithm-sft",
    ("reward", "math"): "cosmos-reward-math",
    ("dataset", "arithmetic"): "cosmos-dataset-arithmetic",
    ("dataset", "jsonl"): "cosmos-dataset-jsonl",
    ("dataset", "shapes"): "cosmos-dataset-shapes",
}


def known_names(kind: Kind) -> list[str]:
    """Names of first-party plugins of a kind, installed or not."""
    return [name for known_kind, name in KNOWN if known_kind == kind]
