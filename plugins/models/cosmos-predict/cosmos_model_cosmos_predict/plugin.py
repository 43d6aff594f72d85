"""The entry point `cosmos-predict`."""

from __future__ import annotations

from cosmos_core.models.diffusion import CAPABILITIES
from cosmos_core.protocols import Model, Provider, hookimpl
from cosmos_model_cosmos_predict.model import CosmosPredictModel
from cosmos_model_cosmos_predict.options import CosmosPredictOptions


@hookimpl
def cosmos_model() -> Provider[Model]:
    """Provide Cosmos-Predict2.5."""
    return Provider(create=CosmosPredictModel, options=CosmosPredictOptions, capabilities=CAPABILITIES)
