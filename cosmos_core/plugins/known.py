"""First-party plugins and commands, and the distributions that provide them, for the hint when one is not installed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from cosmos_core.protocols import Kind

_PROVIDED: Final[Mapping[tuple[Kind, str], str]] = {
    ("model", "cosmos-model-llama"): "llama llama2",
    ("model", "cosmos-model-qwen"): "qwen",
    ("model", "cosmos-model-qwen-vl"): "qwen-vl",
    ("model", "cosmos-model-moe"): "qwen3-moe deepseek moonlight",
    ("model", "cosmos-model-wan"): "wan",
    ("model", "cosmos-model-cosmos-predict"): "cosmos-predict",
    ("algorithm", "cosmos-algorithm-grpo"): "grpo dr-grpo dapo gspo cispo rloo reinforce-plus-plus",
    ("algorithm", "cosmos-algorithm-aipo"): "aipo decoupled-ppo tis icepop sequence-masking",
    ("algorithm", "cosmos-algorithm-sft"): "sft",
    ("algorithm", "cosmos-algorithm-dpo"): "dpo ipo bco",
    ("algorithm", "cosmos-algorithm-distill"): "distill",
    ("algorithm", "cosmos-algorithm-ppo"): "ppo",
    ("algorithm", "cosmos-algorithm-flow-grpo"): "flow-grpo",
    ("algorithm", "cosmos-algorithm-ddrl"): "ddrl",
    ("algorithm", "cosmos-algorithm-diffusion-nft"): "diffusion-nft",
    ("reward", "cosmos-reward-vision"): "brightness clip-similarity colour decoded jpeg-compressibility "
    "latent-temporal-consistency ocr sharpness temporal-consistency",
    ("reward", "cosmos-reward-code"): "code",
    ("reward", "cosmos-reward-text"): "exact format json-schema length regex",
    ("reward", "cosmos-reward-remote"): "judge reward-service service",
    ("reward", "cosmos-reward-math"): "math",
    ("reward", "cosmos-reward-model"): "reward-model",
    ("reward", "cosmos-reward-reason"): "reason-accuracy reason-format",
    ("reward", "cosmos-dataset-reasoning-gym"): "reasoning-gym-score",
    ("dataset", "cosmos-dataset-arithmetic"): "arithmetic",
    ("dataset", "cosmos-dataset-curriculum"): "curriculum",
    ("dataset", "cosmos-dataset-huggingface"): "huggingface",
    ("dataset", "cosmos-dataset-jsonl"): "jsonl",
    ("dataset", "cosmos-dataset-mixture"): "mixture",
    ("dataset", "cosmos-dataset-reason"): "reason reason-mock",
    ("dataset", "cosmos-dataset-reasoning-gym"): "reasoning-gym",
    ("dataset", "cosmos-dataset-shapes"): "shapes",
    ("dataset", "cosmos-environment-crop"): "crop-boards",
    ("dataset", "cosmos-environment-verifiers"): "verifiers-tasks",
    ("dataset", "cosmos-dataset-world"): "world-folder world-mock world-prompts world-webdataset",
    ("engine", "cosmos-engine-diffusion"): "diffusion",
    ("engine", "cosmos-engine-vllm"): "vllm",
    ("environment", "cosmos-environment-calculator"): "calculator",
    ("environment", "cosmos-environment-code-agent"): "code-agent",
    ("environment", "cosmos-environment-command"): "command",
    ("environment", "cosmos-environment-openai-agents"): "openai-agents",
    ("environment", "cosmos-environment-crop"): "crop",
    ("environment", "cosmos-environment-gymnasium"): "gymnasium",
    ("environment", "cosmos-environment-openenv"): "openenv",
    ("environment", "cosmos-environment-textarena"): "textarena",
    ("environment", "cosmos-environment-verifiers"): "verifiers",
    ("hook", "cosmos-tracker-mlflow"): "mlflow",
    ("launcher", "cosmos-launcher-kubernetes"): "kubernetes",
    ("launcher", "cosmos-launcher-slurm"): "slurm",
}
KNOWN: Final[Mapping[tuple[Kind, str], str]] = {
    (kind, name): distribution for (kind, distribution), names in _PROVIDED.items() for name in names.split()
}
_TOOLS: Final = """audit chat compare doctor drain eval generate init keys launch plugins.show profile recipes recover
    replica samples serve set"""
COMMANDS: Final[Mapping[str, str]] = {
    **dict.fromkeys(_TOOLS.split(), "cosmos-service-tools"),
    **dict.fromkeys(("check", "plugins.new"), "cosmos-service-check"),
    "reward-service": "cosmos-service-reward-service",
}
