"""The entry point `llama2`."""

from __future__ import annotations

from cosmos_core.models import DIVERGENCES, HuggingFaceOptions
from cosmos_core.protocols import Model, ModelCapabilities, Provider, hookimpl
from cosmos_model_llama.model import Llama2Model


@hookimpl
def cosmos_model() -> Provider[Model]:
    """Provide Llama 2."""
    return Provider(
        create=Llama2Model,
        options=HuggingFaceOptions,
        capabilities=ModelCapabilities(
            payload_kinds=frozenset({"tokens"}),
            divergences=DIVERGENCES,
            features=True,
            mesh_axes=frozenset({"pp", "dp_replicate", "dp_shard", "cp", "tp"}),
        ),
    )
