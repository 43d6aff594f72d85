"""Memory and weights for modules on meta: each process allocates and fills what it holds, nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn
from transformers import PreTrainedModel

from cosmos_core.errors import PluginIncompatibleError
from cosmos_core.models.weights.loading import refuse_nonfinite
from cosmos_core.models.weights.streaming import Weights
from cosmos_core.weights.shards import local_shard


def materialise(stages: Sequence[PreTrainedModel], *, device: torch.device, offload: bool = False) -> None:
    """Allocate what the stages hold, and compute the buffers that no checkpoint has."""
    for stage in stages:
        shared = _occurrences(stage)
        place = torch.device("cpu") if offload else device
        stage._apply(lambda tensor, place=place: _allocated(tensor, place))  # noqa: SLF001 - `to_empty` loses values
        for (owner, last), *others in shared:
            for other, name in others:
                setattr(other, name, getattr(owner, last))
        _compute_buffers(stage, device)


@torch.no_grad()
def fill(stages: Sequence[PreTrainedModel], weights: Weights) -> None:
    """Give every tensor that the stages hold its values."""
    for stage in stages:
        filled: set[int] = set()
        parameters = {id(parameter) for parameter in stage.parameters()}
        for name, tensor in stage.state_dict(keep_vars=True).items():
            if id(tensor) in filled:
                continue
            filled.add(id(tensor))
            share = local_shard(tensor)
            if share.tensor.numel():
                share.tensor.copy_(weights.read(name, share))
                if weights.path is not None and id(tensor) in parameters:
                    refuse_nonfinite(name, share.tensor, weights.path)


def _occurrences(stage: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """Where each parameter that is used more than once is, in order."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in stage.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            places.setdefault(id(parameter), []).append((module, name))
    return [listed for listed in places.values() if len(listed) > 1]


def _allocated(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device)


def _compute_buffers(stage: PreTrainedModel, device: torch.device) -> None:
    """As transformers does when it loads a checkpoint: what no checkpoint has, the model's own initialisation sets."""
    for path, owner, module in _with_owners("", stage, stage):
        names = [name for name in module._buffers if name in module._non_persistent_buffers_set]  # noqa: SLF001
        names = [name for name in names if module._buffers[name] is not None]  # noqa: SLF001
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            # What transformers' functions leave alone.
            tensor._is_hf_initialized = True  # type: ignore[attr-defined]  # noqa: SLF001
        for name in names:
            buffer = getattr(module, name)
            buffer._is_hf_initialized = False  # noqa: SLF001
            if buffer.is_floating_point():
                buffer.fill_(torch.nan)
        if names:
            with torch.no_grad():
                owner._init_weights(module)  # noqa: SLF001 - the only way to these values
        for name in names:
            if bool(getattr(module, name).isnan().any()):
                raise PluginIncompatibleError(
                    f"{type(stage).__name__}: the buffer {path}{name} is in no checkpoint and {type(module).__name__} "
                    "is not initialised by transformers, so a module that is spread over processes cannot have it"
                )


def _with_owners(
    path: str, owner: PreTrainedModel, module: nn.Module
) -> Iterator[tuple[str, PreTrainedModel, nn.Module]]:
    """Each module, with its path and the innermost model that it belongs to."""
    inner = module if isinstance(module, PreTrainedModel) else owner
    yield path, inner, module
    for name, child in module.named_children():
        yield from _with_owners(f"{path}{name}.", inner, child)
