"""Low-rank adapters beside linear layers: which get one, how `tp` splits it, what is trained, saved and published.

An adapted layer computes `W x + scale B A x` and trains A and B alone. They are its children `lora_A` and `lora_B`.
Rollout replicas know no adapters: they are sent the sum of both.

Of a layer whose outputs are split, A is whole and B split along them; of one whose inputs are split, A is split along
these and B whole: then its terms join the layer's own sum. What is whole sees a part of the gradient on each process,
so its backward pass sums.

Source: arXiv:2106.09685 section 4.1 (B starts at zero); A starts as peft's does, uniform within 1 / sqrt(inputs).

Shape legend: R rank, I inputs and O outputs of a layer.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

import attrs
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from cosmos_core.config.problems import suggestion
from cosmos_core.errors import ConfigError
from cosmos_core.models.parallel.forwards import surround
from cosmos_core.models.parallel.stages import Anatomy
from cosmos_core.models.parallel.tensor import (
    INPUTS,
    OUTPUTS,
    Tensor,
    applied_to,
    apply_style,
    compute_locally,
    split_parameter,
    sum_parameter_gradients,
)
from cosmos_core.models.weights.streaming import Weights
from cosmos_core.protocols import Layout
from cosmos_core.protocols.layout import Lora
from cosmos_core.weights.shards import LocalShard, Merge, canonical_tensors, local_shard

DOWN: Final = "lora_A"
UP: Final = "lora_B"

_SCALE: Final = "_cosmos_adapter_scale"


@attrs.frozen(kw_only=True, eq=False)
class Adapter:
    """The two matrices beside the linear layer called `name`, parameters; `scale` multiplies their product."""

    name: str
    scale: float
    down_RI: torch.Tensor
    up_OR: torch.Tensor


def is_adapter(name: str) -> bool:
    """Tell whether a tensor of this name belongs to an adapter."""
    return bool({DOWN, UP} & set(name.split(".")))


def adapters_of(module: nn.Module) -> Iterator[Adapter]:
    """The adapters that this process holds, or holds shards of, in the order of the module."""
    owners = {id(getattr(child, DOWN).weight): child for child in module.modules() if _SCALE in child.__dict__}
    for name, parameter in module.named_parameters():
        if linear := owners.get(id(parameter)):
            yield Adapter(
                name=name.removesuffix(f".{DOWN}.weight"),
                scale=linear.__dict__[_SCALE],
                down_RI=parameter.detach(),
                up_OR=getattr(linear, UP).weight.detach(),
            )


def trained_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """The tensors that a checkpoint needs: all that travel but frozen weights, if adapters are beside these.

    What lies below adapters never changes: it is the model that the recipe names. Buffers may, such as the balance of
    a router.
    """
    tensors = canonical_tensors(module)
    if next(adapters_of(module), None) is None:
        return tensors
    frozen = {name for name, parameter in module.named_parameters() if not parameter.requires_grad}
    return {name: each for name, each in tensors.items() if name not in frozen}


def published_tensors(module: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, Merge]]:
    """The tensors that rollout replicas get, and what adds the adapters to them; see `below_adapters`."""
    return below_adapters(module, canonical_tensors(module))


def below_adapters(
    module: nn.Module, tensors: Mapping[str, torch.Tensor]
) -> tuple[dict[str, torch.Tensor], dict[str, Merge]]:
    """Some tensors of a module without its adapters, and what adds these to the weights that they adapt, by name.

    Sums are made one by one, when they are copied: all of them would be a second copy of the weights. Every process
    that holds a part of the module calls it: adapters are gathered, here and not then.
    """
    found = {name: tensor for name, tensor in tensors.items() if not is_adapter(name)}
    adapted = {f"{adapter.name}.weight": adapter for adapter in adapters_of(module)}
    return found, {name: _merge(found[name], adapter) for name, adapter in adapted.items()}


@torch.no_grad()
def _merge(weight_OI: torch.Tensor, adapter: Adapter) -> Merge:
    """A function that adds an adapter to this process's share of a layer's weight; the product is summed in float32."""
    rows, columns = local_shard(weight_OI).index
    up_OR, down_RI = _gathered(adapter.up_OR)[rows], _gathered(adapter.down_RI)[:, columns]
    if isinstance(weight_OI, DTensor):
        # What was gathered of other shares is given back.
        up_OR, down_RI = up_OR.clone(), down_RI.clone()

    @torch.no_grad()
    def merge(share_OI: torch.Tensor) -> torch.Tensor:
        added_OI = (up_OR.float() @ down_RI.float()).mul_(adapter.scale).to(share_OI.device)
        return added_OI.add_(share_OI).to(share_OI.dtype)

    return merge


def _gathered(tensor: torch.Tensor) -> torch.Tensor:
    if not isinstance(tensor, DTensor):
        return tensor
    # Shards may be kept on the CPU, where an accelerator's processes cannot meet.
    here = tensor.to(tensor.device_mesh.device_type)
    assert isinstance(here, DTensor)
    return here.full_tensor()


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
            raise ConfigError(
                f"policy.lora.modules: no linear layer of {model}'s layers is called {wanted!r}; "
                f"{suggestion(wanted, names)}"
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
        linear.__dict__[_SCALE] = layout.lora.alpha / layout.lora.rank
        applied = applied_to(linear)
        if applied is not None and applied.style in OUTPUTS | INPUTS:
            _split(linear, name, applied)
        elif applied is not None and layout.sequence_parallel and any(linear is each for each in lone):
            for key in (DOWN, UP):
                sum_parameter_gradients(getattr(linear, key), applied.group)


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


def _split(linear: nn.Linear, name: str, applied: Tensor) -> None:
    down, up = getattr(linear, DOWN), getattr(linear, UP)
    if applied.style in INPUTS:
        split_parameter(down, "weight", f"{name}.{DOWN}", 1, applied.mesh)
        compute_locally(down)
        sum_parameter_gradients(up, applied.group)
        return
    sum_parameter_gradients(down, applied.group)
    # What enters it was made of a whole input and a summed A, so nothing is left to sum.
    inside = attrs.evolve(applied, is_gathered=True)
    apply_style(up, f"{name}.{UP}", "kv_heads" if applied.style == "kv_heads" else "colwise", inside)


def _is_chosen(name: str, lora: Lora) -> bool:
    return ALL_LINEAR in lora.modules or name.rpartition(".")[2] in lora.modules
