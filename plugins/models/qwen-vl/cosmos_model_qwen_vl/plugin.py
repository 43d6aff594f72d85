"""The entry point `qwen-vl`."""

from __future__ import annotations

from cosmos_core.models import DIVERGENCES
from cosmos_core.protocols import Model, ModelCapabilities, Provider, hookimpl
from cosmos_model_qwen_vl.model import QwenVLModel
from cosmos_model_qwen_vl.options import QwenVLOptions


@hookimpl
def cosmos_model() -> Provider[Model]:
    """Provide the Qwen-VL families."""
    return Provider(
        create=QwenVLModel,
        options=QwenVLOptions,
        capabilities=ModelCapabilities(
            payload_kinds=frozenset({"tokens"}),
            divergences=DIVERGENCES,
            features=True,
            mesh_axes=frozenset({"pp", "dp_replicate", "dp_shard", "cp", "tp"}),
        ),
    )
