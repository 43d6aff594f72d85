"""The entry point `deepseek`."""

from __future__ import annotations

from cosmos_core.models import DIVERGENCES
from cosmos_core.protocols import Model, ModelCapabilities, Provider, hookimpl
from cosmos_model_moe.families import DeepseekModel
from cosmos_model_moe.options import MixtureOptions


@hookimpl
def cosmos_model() -> Provider[Model]:
    """Provide the DeepSeek-V3 family."""
    return Provider(
        create=DeepseekModel,
        options=MixtureOptions,
        capabilities=ModelCapabilities(
            payload_kinds=frozenset({"tokens"}),
            divergences=DIVERGENCES,
            features=True,
            mesh_axes=frozenset({"pp", "dp_replicate", "dp_shard", "cp", "tp", "ep"}),
        ),
    )
