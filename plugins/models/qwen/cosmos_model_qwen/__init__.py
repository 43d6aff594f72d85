"""Qwen2, Qwen2.5 and Qwen3 dense language models."""

from cosmos_model_qwen.plugin import QwenModel

__all__ = ["QwenModel"]
