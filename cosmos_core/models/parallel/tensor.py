"""Tensor parallel styles: how one module's parameters are split over `tp`, and what its forward does then.

Parameters become DTensors on the `tp` axis and forwards work on local tensors. Between blocks activations are shared
and their gradients whole, unless the block is *gathered* (see `parallelize`): its input comes from a gather whose
backward sums, and its output leaves through a reduce-scatter, so its linear layers do neither.

Source: arXiv:1909.08053 section 3 (column and row parallel layers), arXiv:2205.05198 section 4.2.1 (sequences).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, TypeAlias

import attrs
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from cosmos_core.errors import PluginIncompatibleError, UnevenError
from cosmos_core.models.parallel.collectives import (
    copy_to_group,
    gather_for_shared,
    reduce_scatter_dim,
    split_dim,
    sum_over_group,
)
from cosmos_core.models.parallel.forwards import own_parameters, substituted, surround

Style: TypeAlias = Literal[
    "colwise",
    "rowwise",
    "colwise_gather_output",
    "rowwise_split_input",
    "heads",
    "kv_heads",
    "summed",
    "embedding_rowwise",
    "vocabulary",
    "mla_kv_a_proj",
    "replicate",
]

SPLIT_STYLES: Final = frozenset({"colwise", "rowwise", "heads", "kv_heads", "summed"})
"""Styles of blocks whose input gradient is partial and whose result is a partial sum: these can be gathered."""

OUTPUTS: Final = frozenset({"colwise", "colwise_gather_output", "kv_heads", "vocabulary"})
"""Styles of linear layers of which a process computes a part of the outputs."""

INPUTS: Final = frozenset({"rowwise", "rowwise_split_input"})
"""Styles of linear layers of which a process sees a part of the inputs."""

_APPLIED: Final = "_cosmos_style"


@attrs.frozen(kw_only=True, eq=False)
class Tensor:
    """The `tp` axis, and whether the module is in a gathered block.

    Attributes:
        mesh: The axis.
        is_gathered: Whether the block round the module gathers its input and scatters its result.
        rope_dim: Size of the rotary part of an MLA latent.
        head_size: Rows of one head, of a projection of keys or values; None of any other module.
        style: Of the module.
    """

    mesh: DeviceMesh
    is_gathered: bool = False
    rope_dim: int = 0
    head_size: int | None = None
    style: Style = "replicate"

    @property
    def group(self) -> dist.ProcessGroup:
        """The group of its processes."""
        return self.mesh.get_group()

    @property
    def size(self) -> int:
        """Their number."""
        return self.mesh.size()

    def enter(self, hidden: torch.Tensor) -> torch.Tensor:
        """The input of a column-wise layer."""
        return hidden if self.is_gathered else copy_to_group(hidden, self.group)

    def leave(self, partial: torch.Tensor) -> torch.Tensor:
        """The result of a row-wise layer, from this process's term."""
        if self.is_gathered:
            return reduce_scatter_dim(partial, partial.dim() - 2, self.group)
        return sum_over_group(partial, self.group)


def applied_to(module: nn.Module) -> Tensor | None:
    """The axis of a module that `apply_style` has seen, with its style."""
    applied: Tensor | None = module.__dict__.get(_APPLIED)
    return applied


def apply_style(module: nn.Module, name: str, style: Style, axis: Tensor) -> None:
    """Split a module's parameters over the axis, and make its forward right for them."""
    if style != "replicate":
        _APPLY[style](module, name, axis)
    module.__dict__[_APPLIED] = attrs.evolve(axis, style=style)


def own_part(total: int, mesh: DeviceMesh) -> range:
    """The rows of a tensor that this process has: all have as many but the last, which may have fewer."""
    most = math.ceil(total / mesh.size())
    start = min(mesh.get_local_rank() * most, total)
    return range(start, min(start + most, total))


def split_parameter(
    module: nn.Module, key: str, name: str, dim: int, mesh: DeviceMesh, *, is_uneven: bool = False
) -> None:
    """Make a parameter a DTensor split along `dim`; one shared with another module is split once.

    If `is_uneven`, the last part may be smaller, though not empty. `name` is the module's, for errors. An UnevenError
    says that the axis does not divide its size, or a process would have nothing.
    """
    parameter = getattr(module, key)
    if isinstance(parameter, DTensor):
        return
    total, size = parameter.shape[dim], mesh.size()
    fits = math.ceil(total / size) * (size - 1) < total if is_uneven else total % size == 0
    if not fits:
        what = "leave some without a part of" if is_uneven else "do not divide"
        raise UnevenError(
            f"policy.mesh: {size} processes of an axis {what} dimension {dim} of {name}.{key}, "
            f"of shape {tuple(parameter.shape)}"
        )
    split = distribute_tensor(parameter.detach(), mesh, [Shard(dim)], src_data_rank=None)
    setattr(module, key, nn.Parameter(split, requires_grad=parameter.requires_grad))


def sum_parameter_gradients(module: nn.Module, group: dist.ProcessGroup) -> None:
    """For replicated parameters whose gradients are partial: each backward pass sums its own share of them.

    A hook on `.grad` would sum again what earlier micro-batches left there.
    """
    _compute_with(module, lambda: {key: copy_to_group(value, group) for key, value in own_parameters(module).items()})


def local_parameters(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """This process's parts of the parameters that a module holds itself."""
    return {
        key: value.to_local() if isinstance(value, DTensor) else value for key, value in own_parameters(module).items()
    }


def compute_locally(module: nn.Module) -> None:
    """Let a forward see this process's parts of the parameters."""
    _compute_with(module, lambda: local_parameters(module))


def _compute_with(module: nn.Module, tensors: Callable[[], Mapping[str, torch.Tensor | None]]) -> None:
    """Let a forward see tensors, made anew for each, in place of the module's own parameters."""

    def around(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with substituted(module, tensors()):
            return inner(*args, **kwargs)

    surround(module, around)


def _colwise(module: nn.Module, name: str, axis: Tensor, *, gathers: bool = False, is_uneven: bool = False) -> None:
    for key in own_parameters(module):
        split_parameter(module, key, name, 0, axis.mesh, is_uneven=is_uneven)

    def around(inner: Callable[..., Any], hidden: torch.Tensor) -> torch.Tensor:
        with substituted(module, local_parameters(module)):
            result: torch.Tensor = inner(axis.enter(hidden))
        return gather_for_shared(result, result.dim() - 1, axis.group) if gathers else result

    surround(module, around)


def _rowwise(module: nn.Module, name: str, axis: Tensor, *, splits: bool = False) -> None:
    split_parameter(module, "weight", name, 1, axis.mesh)

    def around(inner: Callable[..., Any], hidden: torch.Tensor) -> torch.Tensor:
        hidden = split_dim(hidden, hidden.dim() - 1, axis.group) if splits else hidden
        tensors = local_parameters(module)
        bias = tensors.get("bias")
        with substituted(module, {key: None if key == "bias" else value for key, value in tensors.items()}):
            result = axis.leave(inner(hidden))
        if bias is None:
            return result
        return result + (copy_to_group(bias, axis.group) if axis.is_gathered else bias)

    surround(module, around)


def _heads(module: nn.Module, name: str, axis: Tensor) -> None:
    """Parameters that a module holds itself, one row a head (attention sinks)."""
    for key in own_parameters(module):
        split_parameter(module, key, name, 0, axis.mesh)
    compute_locally(module)


def _kv_heads(module: nn.Module, name: str, axis: Tensor) -> None:
    """A projection with fewer heads than processes: whole on each, which computes the one head it needs."""
    rows, length = own_parameters(module)["weight"].shape[0], axis.head_size
    if length is None:
        raise PluginIncompatibleError(f"tensor_plan: {name} is 'kv_heads', and is no projection of keys or values")
    num_heads = rows // length
    if axis.size % num_heads:
        raise UnevenError(f"policy.mesh.tp: {axis.size} and the {num_heads} heads of {name} do not divide each other")
    start = axis.mesh.get_local_rank() * num_heads // axis.size * length

    def around(inner: Callable[..., Any], hidden: torch.Tensor) -> Any:
        tensors = {
            key: copy_to_group(value, axis.group).narrow(0, start, length)
            for key, value in own_parameters(module).items()
        }
        with substituted(module, tensors):
            return inner(axis.enter(hidden))

    surround(module, around)


def _mla_kv_a(module: nn.Module, _: str, axis: Tensor) -> None:
    """A whole latent: its rotary part goes to local heads only, the rest enters a column-wise layer."""

    def around(inner: Callable[..., Any], hidden: torch.Tensor) -> torch.Tensor:
        latent: torch.Tensor = inner(hidden)
        rest, rotary = torch.split(latent, [latent.shape[-1] - axis.rope_dim, axis.rope_dim], dim=-1)
        return torch.cat((rest, copy_to_group(rotary, axis.group)), dim=-1)

    surround(module, around)


def _embedding(module: nn.Module, name: str, axis: Tensor) -> None:
    """Each process looks up the tokens of its part of the vocabulary; the others are zero there."""
    assert isinstance(module, nn.Embedding)
    split_parameter(module, "weight", name, 0, axis.mesh, is_uneven=True)
    own, padding = own_part(module.num_embeddings, axis.mesh), module.padding_idx
    local_padding = padding - own.start if padding is not None and padding in own else None

    def around(inner: Callable[..., Any], tokens: torch.Tensor) -> torch.Tensor:
        is_foreign = (tokens < own.start) | (tokens >= own.stop)
        module.padding_idx = local_padding
        try:
            with substituted(module, local_parameters(module)):
                rows = inner((tokens - own.start).masked_fill(is_foreign, 0))
        finally:
            module.padding_idx = padding
        return sum_over_group(rows.masked_fill(is_foreign[..., None], 0.0), axis.group)

    surround(module, around)


_APPLY: Final[Mapping[Style, Callable[[nn.Module, str, Tensor], None]]] = {
    "colwise": _colwise,
    "rowwise": _rowwise,
    "colwise_gather_output": functools.partial(_colwise, gathers=True),
    "rowwise_split_input": functools.partial(_rowwise, splits=True),
    "heads": _heads,
    "kv_heads": _kv_heads,
    "summed": lambda module, _, axis: sum_parameter_gradients(module, axis.group),
    "embedding_rowwise": _embedding,
    "vocabulary": functools.partial(_colwise, is_uneven=True),
    "mla_kv_a_proj": _mla_kv_a,
}
