"""The entry point `qwen-vl`."""

from __future__ import annotations

from cosmos_core.models import CAPABILITIES
from cosmos_core.protocols import Model, Provider, hookimpl
from cosmos_model_qwen_vl.model import QwenVLModel
from cosmos_model_qwen_vl.options import QwenVLOptions


@hookimpl
def cosmos_model() -> Provider[Model]:
    """Provide the Qwen-VL families."""
    return Provider(create=QwenVLModel, options=QwenVLOptions, capabilities=CAPABILITIES)
