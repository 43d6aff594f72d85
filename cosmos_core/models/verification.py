"""The check that makes a generic model safe: packed evaluation against transformers' own forward.

Any causal language model of transformers may be named in a recipe. Some cannot be packed (recurrent layers carry
state over a document's end), some scale their logits in ways of their own. Instead of a list of names, each model
is tried once when it is built, on two short documents: itself where it is whole, else a small one of the same make.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import torch
from transformers import PreTrainedModel

from cosmos_core.errors import PluginIncompatibleError
from cosmos_core.models.attention.packed import attend_packed

KNOWN_LAYERS: Final = frozenset({"full_attention", "sliding_attention"})
LONGEST_WINDOW: Final = 256
"""Sliding windows up to this length are exercised; longer ones would make the check slow."""

PackedLogits: TypeAlias = Callable[[PreTrainedModel, torch.Tensor, Sequence[int]], torch.Tensor]
"""Gives [U, V] of a model for tokens [U] and the lengths of their documents."""


@torch.no_grad()
def verify_packing(module: PreTrainedModel, packed_logits: PackedLogits) -> None:
    """Compare the logits of packed documents with those of each document alone.

    Raises:
        PluginIncompatibleError: They differ, or the model has layers that are known not to pack.
    """
    check_layers(module)
    config = module.config.get_text_config()
    window = getattr(config, "sliding_window", None)
    lengths = (window + 3 if isinstance(window, int) and 0 < window <= LONGEST_WINDOW else 7, 5)
    ids = torch.randint(0, config.vocab_size, (sum(lengths),), generator=torch.Generator().manual_seed(0))
    ids = ids.to(module.device)
    packed = packed_logits(module, ids, lengths)
    compare(
        module,
        packed,
        own_logits(module, [{"input_ids": part[None]} for part in torch.split(ids, list(lengths))]),
        "a model plugin must override HuggingFaceModel.logits or HuggingFaceModel.hidden for it",
    )


def check_layers(module: PreTrainedModel) -> None:
    """Refuse a model with layers that are known not to pack."""
    foreign = set(getattr(module.config.get_text_config(), "layer_types", None) or ()) - KNOWN_LAYERS
    if foreign:
        raise PluginIncompatibleError(
            f"{type(module).__name__} has {', '.join(sorted(foreign))} layers, which cannot be packed"
        )


def own_logits(module: PreTrainedModel, documents: Sequence[Mapping[str, Any]]) -> torch.Tensor:
    """Logits [U, V] of transformers' own forward of each document alone, given as the arguments of that."""
    # Of transformers' attention functions only this one computes soft caps and attention sinks.
    module.set_attn_implementation("eager")
    try:
        return torch.cat([module(**given, use_cache=False).logits[0] for given in documents])
    finally:
        attend_packed(module)


def compare(module: PreTrainedModel, packed: torch.Tensor, alone: torch.Tensor, advice: str) -> None:
    """Compare logits [U, V] of packed documents with those of each alone.

    Raises:
        PluginIncompatibleError: They differ; the message ends in the advice.
    """
    difference = (packed.float() - alone.float()).abs().max().item()
    scale = max(alone.float().abs().max().item(), 1.0)
    tolerance = (1e-3 if module.dtype == torch.float32 else 0.1) * scale
    if not difference <= tolerance:
        raise PluginIncompatibleError(
            f"{type(module).__name__}: packed logits differ from its own forward by {difference:.3g} (allowed "
            f"{tolerance:.3g}); {advice}"
        )
