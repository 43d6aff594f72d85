"""Low-rank adapters beside linear layers: what is trained, saved and published of a module that has them.

An adapted layer computes `W x + scale B A x` and trains A and B alone. They are its children `lora_A` and `lora_B`.
Rollout replicas know no adapters: they are sent the sum of both.

Source: arXiv:2106.09685 section 4.1.

Shape legend: R rank, I inputs and O outputs of a layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import attrs
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from cosmos_core.weights.shards import canonical_tensors, local_shard

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


def note_scale(linear: nn.Module, scale: float) -> None:
    """Remember that a layer has an adapter, and its scale."""
    linear.__dict__[_SCALE] = scale


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
    if not _is_adapted(module):
        return tensors
    frozen = {name for name, parameter in module.named_parameters() if not parameter.requires_grad}
    return {name: each for name, each in tensors.items() if name not in frozen}


def published_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """The tensors that rollout replicas get: those of the model below the adapters, these added to them.

    Every process that holds a part of the module calls it: adapters are gathered.
    """
    tensors = canonical_tensors(module)
    if not _is_adapted(module):
        return tensors
    base = {name: tensor for name, tensor in tensors.items() if not is_adapter(name)}
    for adapter in adapters_of(module):
        name = f"{adapter.name}.weight"
        base[name] = merged(base[name], adapter)
    return base


def published_state(module: nn.Module) -> dict[str, torch.Tensor]:
    """The state of the model below the adapters, these added to it; of a module without any, its state."""
    state: dict[str, torch.Tensor] = module.state_dict()
    if not _is_adapted(module):
        return state
    added = published_tensors(module)
    return {name: added.get(name, tensor) for name, tensor in state.items() if not is_adapter(name)}


@torch.no_grad()
def merged(weight_OI: torch.Tensor, adapter: Adapter) -> torch.Tensor:
    """A layer's weight with its adapter added, spread as the weight is; the product is summed in float32."""
    down_RI, up_OR = _whole(adapter.down_RI), _whole(adapter.up_OR)
    share = local_shard(weight_OI)
    rows, columns = share.index
    added = adapter.scale * (up_OR[rows].float() @ down_RI[:, columns].float())
    local = (share.tensor + added.to(share.tensor.device)).to(weight_OI.dtype)
    if not isinstance(weight_OI, DTensor):
        return local
    return DTensor.from_local(
        local,
        weight_OI.device_mesh,
        weight_OI.placements,
        run_check=False,
        shape=weight_OI.shape,
        stride=weight_OI.stride(),
    )


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    if not isinstance(tensor, DTensor):
        return tensor
    # Shards may be kept on the CPU, where an accelerator's processes cannot meet.
    here = tensor.to(tensor.device_mesh.device_type)
    assert isinstance(here, DTensor)
    return here.full_tensor()


def _is_adapted(module: nn.Module) -> bool:
    return any(_SCALE in child.__dict__ for child in module.modules())
