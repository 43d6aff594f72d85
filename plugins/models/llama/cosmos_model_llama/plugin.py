"""The entry point `llama`."""

from __future__ import annotations

from cosmos_core.models import CAPABILITIES, HuggingFaceOptions
from cosmos_core.protocols import Model, Provider, hookimpl
from cosmos_model_llama.model import LlamaModel


@hookimpl
def cosmos_model() -> Provider[Model]:
    """Provide the Llama family."""
    return Provider(create=LlamaModel, options=HuggingFaceOptions, capabilities=CAPABILITIES)
