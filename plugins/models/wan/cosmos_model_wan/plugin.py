"""The entry point `wan`."""

from __future__ import annotations

from cosmos_core.models.diffusion import DIVERGENCES
from cosmos_core.protocols import Model, ModelCapabilities, Provider, hookimpl
from cosmos_model_wan.model import WanModel, WanOptions


@hookimpl
def cosmos_model() -> Provider[Model]:
    """Provide Wan2.1."""
    return Provider(
        create=WanModel,
        options=WanOptions,
        capabilities=ModelCapabilities(
            payload_kinds=frozenset({"latents"}),
            mesh_axes=frozenset({"dp_replicate", "dp_shard", "cp"}),
            divergences=DIVERGENCES,
            blends=True,
        ),
    )
