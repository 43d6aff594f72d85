"""The check that makes a generic model safe: packed evaluation against transformers' own forward.

Any causal language model of transformers may be named in a recipe. Some cannot be packed (recurrent layers carry
state over a document's end), some scale their logits in ways of their own. Instead of a list of names, each model
is tried once when it is built, on two short documents.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import torch
from transformers import PreTrainedModel

from cosmos_core.errors import PluginIncompatibleError
from cosmos_core.policy.modeling.attention.packed import PACKED

KNOWN_LAYERS: Final = frozenset({"full_attention", "sliding_attention"})
LONGEST_WINDOW: Final = 256
"""Sliding windows up to this length are exercised; longer ones would make the check slow."""


def verify_packing(
    module: PreTrainedModel, packed_logits: Callable[[torch.Tensor, Sequence[int]], torch.Tensor]
) -> None:
    """Compare the logits of packed documents with those of each document alone.

    Args:
        module: The model, with packed attention.
        packed_logits: Gives [U, V] for tokens [U] and the lengths of their documents.

    Raises:
        PluginIncompatibleError: They differ, or the model has layers that are known not to pack.
    """
    config = module.config.get_text_config()
    name = type(module).__name__
    check_layers(module)
    lengths = (_probe_length(config), 5)
    device, dtype = module.device, module.dtype
    ids = torch.randint(0, config.vocab_size, (sum(lengths),), generator=torch.Generator().manual_seed(0)).to(device)
    was_training = module.training
    module.eval()
    with torch.no_grad():
        packed = packed_logits(ids, lengths).float()
        # Of transformers' attention functions only this one computes soft caps and attention sinks.
        module.set_attn_implementation("eager")
        try:
            alone = torch.cat(
                [module(input_ids=part[None], use_cache=False).logits[0] for part in torch.split(ids, list(lengths))]
            )
        finally:
            module.set_attn_implementation(PACKED)
    module.train(was_training)
    difference = (packed - alone.float()).abs().max().item()
    scale = max(alone.float().abs().max().item(), 1.0)
    tolerance = (1e-3 if dtype == torch.float32 else 0.1) * scale
    if not difference <= tolerance:
        raise PluginIncompatibleError(
            f"{name}: packed logits differ from its own forward by {difference:.3g} (allowed {tolerance:.3g}); "
            "a model plugin must override HuggingFaceModel.logits or HuggingFaceModel.hidden for it"
        )


def check_layers(module: PreTrainedModel) -> None:
    """Refuse a model with layers that are known not to pack.

    Raises:
        PluginIncompatibleError: It has some.
    """
    foreign = set(getattr(module.config.get_text_config(), "layer_types", None) or ()) - KNOWN_LAYERS
    if foreign:
        raise PluginIncompatibleError(
            f"{type(module).__name__} has {', '.join(sorted(foreign))} layers, which cannot be packed"
        )


def _probe_length(config: object) -> int:
    window = getattr(config, "sliding_window", None)
    return window + 3 if isinstance(window, int) and 0 < window <= LONGEST_WINDOW else 7
