"""Llama language models."""

from cosmos_model_llama.model import LlamaModel

__all__ = ["LlamaModel"]
