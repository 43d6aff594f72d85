"""The model plugin `hf`: any Hugging Face causal language model."""

from __future__ import annotations

from typing import get_args

from cosmos_core.policy.modeling.encoding import HuggingFaceOptions
from cosmos_core.policy.modeling.huggingface import HuggingFaceModel
from cosmos_core.protocols import Axis, Model, ModelCapabilities, Provider, hookimpl


@hookimpl
def cosmos_model() -> Provider[Model]:
    """Provide the generic model."""
    return Provider(
        create=HuggingFaceModel,
        options=HuggingFaceOptions,
        capabilities=ModelCapabilities(
            payload_kinds=frozenset({"tokens"}),
            # Those that a model cannot use are refused by its facts.
            mesh_axes=frozenset(get_args(Axis)),
        ),
    )
