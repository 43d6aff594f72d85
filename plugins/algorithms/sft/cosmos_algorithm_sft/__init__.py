"""Supervised fine-tuning on demonstrations."""

from cosmos_algorithm_sft.plugin import Sft, SftOptions

__all__ = ["Sft", "SftOptions"]
