"""Wan2.1: video diffusion from text, and from text and an image."""

from cosmos_model_wan.model import WanModel
from cosmos_model_wan.options import WanOptions

__all__ = ["WanModel", "WanOptions"]
