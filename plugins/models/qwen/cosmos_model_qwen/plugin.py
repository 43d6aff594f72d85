"""The entry point `qwen`."""

from __future__ import annotations

from cosmos_core.models import DIVERGENCES, HuggingFaceOptions
from cosmos_core.protocols import Model, ModelCapabilities, Provider, hookimpl
from cosmos_model_qwen.model import QwenModel


@hookimpl
def cosmos_model() -> Provider[Model]:
    """Provide the Qwen family."""
    return Provider(
        create=QwenModel,
        options=HuggingFaceOptions,
        capabilities=ModelCapabilities(
            payload_kinds=frozenset({"tokens"}),
            divergences=DIVERGENCES,
            features=True,
            mesh_axes=frozenset({"pp", "dp_replicate", "dp_shard", "cp", "tp"}),
        ),
    )
