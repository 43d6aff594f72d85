"""Latent attention (MLA): vLLM computes with two parts of its up-projection, which it takes when it has loaded it.

They are views of it where it is computed with as it is, and copies else. After each update they are taken anew by
vLLM's own step, which copies into what is there, as captured graphs read it, and they are compared with the projection.
Latent attention that vLLM serves in another form (packed, or in 8 bits) lacks them, and is refused like all that it
makes of weights.

Shape legend: N heads of this rank, P values of a key without its position, V of a value, L latent values.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import torch

_KEYS: Final = "W_UK_T"
_VALUES: Final = "W_UV"
_MAKE: Final = "process_weights_after_loading"


def made_again(model: torch.nn.Module) -> frozenset[str]:
    """Names of the tensors that `make_again` makes."""
    return frozenset(f"{name}.{part}" for name, _ in _layers(model) for part in (_KEYS, _VALUES))


def make_again(model: torch.nn.Module) -> None:
    """After an update: take the parts of the projections as they are now."""
    for _, layer in _layers(model):
        getattr(layer, _MAKE)(getattr(layer, _VALUES).dtype)


def wrong(model: torch.nn.Module) -> Iterator[tuple[torch.Tensor, str]]:
    """Projections of which a layer does not have the parts: (projection, name of the layer)."""
    for name, layer in _layers(model):
        keys_NPL, values_NLV, projection = getattr(layer, _KEYS), getattr(layer, _VALUES), layer.kv_b_proj.weight
        whole_NRL = projection.view(len(keys_NPL), -1, keys_NPL.shape[-1]).to(keys_NPL.dtype)
        parts = whole_NRL.split([keys_NPL.shape[1], values_NLV.shape[2]], dim=1)
        if not (torch.equal(keys_NPL, parts[0]) and torch.equal(values_NLV, parts[1].transpose(1, 2))):
            yield projection, name


def _layers(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    for name, layer in model.named_modules():
        parts = (getattr(layer, _KEYS, None), getattr(layer, _VALUES, None))
        if all(isinstance(part, torch.Tensor) for part in parts) and hasattr(layer, _MAKE):
            yield name, layer
