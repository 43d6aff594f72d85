"""The entry point `qwen3-moe`."""

from __future__ import annotations

from cosmos_core.models import MIXTURE_CAPABILITIES
from cosmos_core.protocols import Model, Provider, hookimpl
from cosmos_model_moe.families import QwenMoeModel
from cosmos_model_moe.options import MixtureOptions


@hookimpl
def cosmos_model() -> Provider[Model]:
    """Provide the Qwen3-MoE family."""
    return Provider(create=QwenMoeModel, options=MixtureOptions, capabilities=MIXTURE_CAPABILITIES)
