"""The entry point `qwen3-moe`."""

from __future__ import annotations

from cosmos_core.models import DIVERGENCES
from cosmos_core.protocols import Model, ModelCapabilities, Provider, hookimpl
from cosmos_model_moe.families import QwenMoeModel
from cosmos_model_moe.options import MixtureOptions


@hookimpl
def cosmos_model() -> Provider[Model]:
    """Provide the Qwen3-MoE family."""
    return Provider(
        create=QwenMoeModel,
        options=MixtureOptions,
        capabilities=ModelCapabilities(
            payload_kinds=frozenset({"tokens"}),
            divergences=DIVERGENCES,
            features=True,
            mesh_axes=frozenset({"pp", "dp_replicate", "dp_shard", "cp", "tp", "ep"}),
        ),
    )
