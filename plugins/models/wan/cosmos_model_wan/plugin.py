"""The entry point `wan`."""

from __future__ import annotations

from cosmos_core.models.diffusion import CAPABILITIES
from cosmos_core.protocols import Model, Provider, hookimpl
from cosmos_model_wan.model import WanModel, WanOptions


@hookimpl
def cosmos_model() -> Provider[Model]:
    """Provide Wan2.1."""
    return Provider(create=WanModel, options=WanOptions, capabilities=CAPABILITIES)
