"""The entry point `deepseek`."""

from __future__ import annotations

from cosmos_core.models import MIXTURE_CAPABILITIES
from cosmos_core.protocols import Model, Provider, hookimpl
from cosmos_model_moe.families import DeepseekModel
from cosmos_model_moe.options import MixtureOptions


@hookimpl
def cosmos_model() -> Provider[Model]:
    """Provide the DeepSeek-V3 family."""
    return Provider(create=DeepseekModel, options=MixtureOptions, capabilities=MIXTURE_CAPABILITIES)
