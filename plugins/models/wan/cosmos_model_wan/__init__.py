"""Wan2.1: video diffusion from text, and from text and an image."""

from cosmos_model_wan.model import WanModel, WanOptions

__all__ = ["WanModel", "WanOptions"]
