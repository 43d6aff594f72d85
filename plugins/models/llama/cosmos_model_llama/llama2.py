"""The entry point `llama2`."""

from __future__ import annotations

from cosmos_core.models import CAPABILITIES, HuggingFaceOptions
from cosmos_core.protocols import Model, Provider, hookimpl
from cosmos_model_llama.model import Llama2Model


@hookimpl
def cosmos_model() -> Provider[Model]:
    """Provide Llama 2."""
    return Provider(create=Llama2Model, options=HuggingFaceOptions, capabilities=CAPABILITIES)
