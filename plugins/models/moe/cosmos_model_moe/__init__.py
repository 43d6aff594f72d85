"""Mixture-of-experts language models: Qwen3-MoE, DeepSeek-V3, Moonlight."""

from cosmos_model_moe.families import DeepseekModel, MoonlightModel, QwenMoeModel
from cosmos_model_moe.options import MixtureOptions

__all__ = ["DeepseekModel", "MixtureOptions", "MoonlightModel", "QwenMoeModel"]
