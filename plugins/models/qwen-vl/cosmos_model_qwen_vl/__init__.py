"""Qwen2.5-VL and Qwen3-VL: language models that see images and videos."""

from cosmos_model_qwen_vl.model import QwenVLModel
from cosmos_model_qwen_vl.options import QwenVLOptions

__all__ = ["QwenVLModel", "QwenVLOptions"]
