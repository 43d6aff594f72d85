"""Llama language models."""

from cosmos_model_llama.model import Llama2Model, LlamaModel

__all__ = ["Llama2Model", "LlamaModel"]
