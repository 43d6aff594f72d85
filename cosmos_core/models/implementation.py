"""Which attention each part of a model computes with: packed for text, transformers' own for towers beside it."""

from __future__ import annotations

from typing import Final

from transformers import PreTrainedModel

from cosmos_core.models.attention.packed import PACKED

TOWER_ATTENTION: Final = "sdpa"


def attend_packed(module: PreTrainedModel) -> None:
    """Let the text of a model attend within packed documents, and its towers to all of what they are shown."""
    text = module.config.get_text_config()
    parts = {name: getattr(module.config, name, None) for name in module.config.sub_configs}
    if text is module.config:
        parts = {}
    kinds = {name: PACKED if part is text else TOWER_ATTENTION for name, part in parts.items() if part is not None}
    module.set_attn_implementation({"": PACKED, **kinds} if kinds else PACKED)
