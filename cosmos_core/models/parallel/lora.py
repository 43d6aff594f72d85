"""Low-rank adapters of a Hugging Face module: which layers get one, how `tp` splits it, where its values come from.

Of a layer whose outputs are split, A is whole and B split along them; of one whose inputs are split, A is split along
these and B whole: then its terms join the layer's own sum. What is whole sees a part of the gradient on each process,
so its backward pass sums.

Source: arXiv:2106.09685 section 4.1 (B starts at zero); A starts as peft's does, uniform within 1 / sqrt(inputs).
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import logging
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import attrs
import torch
from torch import nn
from transformers import PreTrainedModel

from cosmos_core.errors import ConfigError
from cosmos_core.models.adapters import DOWN, UP, is_adapter, note_scale
from cosmos_core.models.parallel.anatomy import Anatomy
from cosmos_core.models.parallel.forwards import surround
from cosmos_core.models.parallel.tensor import (
    INPUTS,
    OUTPUTS,
    Applied,
    applied_to,
    apply_style,
    compute_locally,
    head_size,
    note_head_size,
    split_parameter,
    sum_parameter_gradients,
)
from cosmos_core.models.weights.streaming import Weights
from cosmos_core.protocols import Layout
from cosmos_core.protocols.layout import Lora
from cosmos_core.weights.shards import LocalShard, local_shard

_LOG: Final = logging.getLogger(__name__)

ALL_LINEAR: Final = "all-linear"


def check_adapted(layers: Iterable[nn.Module], model: str, lora: Lora) -> None:
    """Refuse what names no layer, and say what is adapted."""
    linear = [
        (name, child) for layer in layers for name, child in layer.named_modules() if isinstance(child, nn.Linear)
    ]
    names = {name.rpartition(".")[2] for name, _ in linear}
    for wanted in lora.modules:
        if wanted != ALL_LINEAR and wanted not in names:
            near = difflib.get_close_matches(wanted, names, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(
                f"policy.lora.modules: no linear layer of {model}'s layers is called {wanted!r}{hint} "
                f"There are: {', '.join(sorted(names)) or 'none'}"
            )
    if not linear:
        raise ConfigError(f"policy.lora: {model} has no linear layers to adapt")
    chosen = [child for name, child in linear if _is_chosen(name, lora)]
    count = sum(lora.rank * sum(child.weight.shape) for child in chosen)
    _LOG.info("adapters of rank %d: %d linear layers, %s parameters", lora.rank, len(chosen), f"{count:,}")


def surround_adapted(layers: Mapping[str, nn.Module], layout: Layout) -> dict[str, nn.Linear]:
    """Make the layers that get adapters add them; comes before anything that splits those. They are returned."""
    if layout.lora is None:
        return {}
    found = {
        f"{name}.{part}": child
        for name, layer in layers.items()
        for part, child in layer.named_modules()
        if isinstance(child, nn.Linear) and _is_chosen(part, layout.lora)
    }
    scale = layout.lora.alpha / layout.lora.rank
    for linear in found.values():
        surround(linear, functools.partial(_with_adapter, linear, scale))
    return found


def add_adapters(module: PreTrainedModel, adapted: Mapping[str, nn.Linear], layout: Layout) -> None:
    """Give layers their adapters, without values, and freeze everything else; comes after what splits the layers."""
    if layout.lora is None:
        return
    module.requires_grad_(requires_grad=False)
    anatomy = Anatomy.of(module) if layout.mesh.size("tp") > 1 else None
    # Children of a layer see a part of the sequence, where that is split.
    lone = [child for layer in (anatomy.layers if anatomy is not None else ()) for child in layer.children()]
    for name, linear in adapted.items():
        sizes = linear.in_features, layout.lora.rank, linear.out_features
        for key, shape in ((DOWN, sizes[:2]), (UP, sizes[1:])):
            setattr(linear, key, nn.Linear(*shape, bias=False, device=linear.weight.device, dtype=linear.weight.dtype))
        note_scale(linear, layout.lora.alpha / layout.lora.rank)
        applied = applied_to(linear)
        if applied is not None and applied.style in OUTPUTS | INPUTS:
            _split(linear, name, applied)
        elif applied is not None and layout.sequence_parallel and any(linear is each for each in lone):
            for key in (DOWN, UP):
                sum_parameter_gradients(getattr(linear, key), applied.axis.group)


@torch.no_grad()
def draw_adapters(module: nn.Module, seed: int) -> None:
    """Give the adapters of a module that one process holds the values that training starts from."""
    for name, parameter in module.named_parameters():
        if is_adapter(name):
            parameter.copy_(_start(seed, name, local_shard(parameter)))


def with_adapters(below: Weights, seed: int) -> Weights:
    """A model's weights, and the values from which its adapters start."""
    return lambda name, share: _start(seed, name, share) if is_adapter(name) else below(name, share)


def _start(seed: int, name: str, share: LocalShard) -> torch.Tensor:
    """The part of an adapter's matrix where a share lies, float32 on the CPU: each matrix has a seed of its own."""
    if UP in name.split("."):
        return torch.zeros(share.shape)[share.index]
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    bound = 1.0 / math.sqrt(share.shape[1])
    return torch.empty(share.shape).uniform_(-bound, bound, generator=generator)[share.index]


def _with_adapter(linear: nn.Linear, scale: float, inner: Callable[..., Any], hidden: torch.Tensor) -> torch.Tensor:
    adapted: torch.Tensor = getattr(linear, UP)(getattr(linear, DOWN)(hidden))
    result: torch.Tensor = inner(hidden)
    return result + scale * adapted


def _split(linear: nn.Linear, name: str, applied: Applied) -> None:
    down, up = getattr(linear, DOWN), getattr(linear, UP)
    if applied.style in INPUTS:
        split_parameter(down, "weight", f"{name}.{DOWN}", 1, applied.axis.mesh)
        compute_locally(down)
        sum_parameter_gradients(up, applied.axis.group)
        return
    sum_parameter_gradients(down, applied.axis.group)
    if applied.style == "kv_heads":
        note_head_size(up, head_size(linear))
    # What enters it was made of a whole input and a summed A, so nothing is left to sum.
    inside = attrs.evolve(applied.axis, is_gathered=True)
    apply_style(up, f"{name}.{UP}", "kv_heads" if applied.style == "kv_heads" else "colwise", inside)


def _is_chosen(name: str, lora: Lora) -> bool:
    return ALL_LINEAR in lora.modules or name.rpartition(".")[2] in lora.modules
