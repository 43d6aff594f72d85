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
    ("model", "wan"): "cosmos-model-wan",
    ("model", "cosmos-predict"): "cosmos-model-cosmos-predict",
    ("algorithm", "grpo"): "cosmos-algorithm-grpo",
    ("algorithm", "dr-grpo"): "cosmos-algorithm-grpo",
    ("algorithm", "dapo"): "cosmos-algorithm-grpo",
    ("algorithm", "gspo"): "cosmos-algorithm-grpo",
    ("algorithm", "cispo"): "cosmos-algorithm-grpo",
    ("algorithm", "rloo"): "cosmos-algorithm-grpo",
    ("algorithm", "reinforce-plus-plus"): "cosmos-algorithm-grpo",
    ("algorithm", "aipo"): "cosmos-algorithm-aipo",
    ("algorithm", "decoupled-ppo"): "cosmos-algorithm-aipo",
    ("algorithm", "tis"): "cosmos-algorithm-aipo",
    ("algorithm", "icepop"): "cosmos-algorithm-aipo",
    ("algorithm", "sequence-masking"): "cosmos-algorithm-aipo",
    ("algorithm", "sft"): "cosmos-algorithm-sft",
    ("algorithm", "dpo"): "cosmos-algorithm-dpo",
    ("algorithm", "ipo"): "cosmos-algorithm-dpo",
    ("algorithm", "bco"): "cosmos-algorithm-dpo",
    ("algorithm", "distill"): "cosmos-algorithm-distill",
    ("algorithm", "ppo"): "cosmos-algorithm-ppo",
    ("algorithm", "flow-grpo"): "cosmos-algorithm-flow-grpo",
    ("algorithm", "ddrl"): "cosmos-algorithm-ddrl",
    ("algorithm", "diffusion-nft"): "cosmos-algorithm-diffusion-nft",
    ("reward", "brightness"): "cosmos-reward-vision",
    ("reward", "clip-similarity"): "cosmos-reward-vision",
    ("reward", "code"): "cosmos-reward-code",
    ("reward", "colour"): "cosmos-reward-vision",
    ("reward", "exact"): "cosmos-reward-text",
    ("reward", "format"): "cosmos-reward-text",
    ("reward", "json-schema"): "cosmos-reward-text",
    ("reward", "jpeg-compressibility"): "cosmos-reward-vision",
    ("reward", "judge"): "cosmos-reward-remote",
    ("reward", "latent-temporal-consistency"): "cosmos-reward-vision",
    ("reward", "length"): "cosmos-reward-text",
    ("reward", "math"): "cosmos-reward-math",
    ("reward", "ocr"): "cosmos-reward-vision",
    ("reward", "regex"): "cosmos-reward-text",
    ("reward", "reward-model"): "cosmos-reward-model",
    ("reward", "reward-service"): "cosmos-reward-remote",
    ("reward", "service"): "cosmos-reward-remote",
    ("reward", "sharpness"): "cosmos-reward-vision",
    ("reward", "temporal-consistency"): "cosmos-reward-vision",
    ("reward", "reason-accuracy"): "cosmos-reward-reason",
    ("reward", "reason-format"): "cosmos-reward-reason",
    ("dataset", "arithmetic"): "cosmos-dataset-arithmetic",
    ("dataset", "curriculum"): "cosmos-dataset-curriculum",
    ("dataset", "huggingface"): "cosmos-dataset-huggingface",
    ("dataset", "jsonl"): "cosmos-dataset-jsonl",
    ("dataset", "mixture"): "cosmos-dataset-mixture",
    ("dataset", "reason"): "cosmos-dataset-reason",
    ("dataset", "shapes"): "cosmos-dataset-shapes",
    ("dataset", "world-folder"): "cosmos-dataset-world",
    ("dataset", "world-mock"): "cosmos-dataset-world",
    ("dataset", "world-prompts"): "cosmos-dataset-world",
    ("dataset", "world-webdataset"): "cosmos-dataset-world",
    ("engine", "vllm"): "cosmos-engine-vllm",
    ("environment", "calculator"): "cosmos-environment-calculator",
    ("environment", "gymnasium"): "cosmos-environment-gymnasium",
    ("hook", "mlflow"): "cosmos-tracker-mlflow",
    ("launcher", "kubernetes"): "cosmos-launcher-kubernetes",
    ("launcher", "slurm"): "cosmos-launcher-slurm",
}


def known_names(kind: Kind) -> list[str]:
    """Names of first-party plugins of a kind, installed or not."""
    return [name for known_kind, name in KNOWN if known_kind == kind]
