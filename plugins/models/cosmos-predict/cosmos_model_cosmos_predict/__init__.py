"""Cosmos-Predict2.5: video diffusion of worlds, from text, an image or a video."""

from cosmos_model_cosmos_predict.model import CosmosPredictModel
from cosmos_model_cosmos_predict.options import CosmosPredictOptions

__all__ = ["CosmosPredictModel", "CosmosPredictOptions"]
