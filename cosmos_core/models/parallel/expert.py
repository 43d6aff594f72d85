"""Expert parallelism: whole experts spread over `ep`, tokens sent to the experts they chose and back.

The processes of one `tp` group hold the same tokens, so each sends its share of the rows, and the results are joined.
An experts module is one that holds all of its experts in tensors whose first dimension counts them, and is called
with (hidden_TD, chosen_TK, weights_TK), as transformers' are; its own forward (grouped products, see `grouped`) runs on
what arrives, one expert a row.

Source: arXiv:2006.16668 section 3.2 (all-to-all dispatch), without a capacity: no token is dropped.

Shape legend: T tokens, K experts that each chose, D hidden size, P = T·K pairs, R rows that arrive, E local experts.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from cosmos_core.errors import PluginIncompatibleError, UnevenError
from cosmos_core.models.parallel.collectives import Group, all_to_all, gather_for_shared, part, split_dim
from cosmos_core.models.parallel.forwards import own_parameters, substituted, surround
from cosmos_core.models.parallel.grouped import in_order, permuted, weighed
from cosmos_core.models.parallel.tensor import local_parameters, split_parameter


def is_experts(module: nn.Module) -> bool:
    """Tell whether a module holds experts in tensors whose first dimension counts them."""
    count = getattr(module, "num_experts", None)
    parameters = own_parameters(module).values()
    return (
        isinstance(count, int)
        and count > 1
        and any(value.dim() == 3 for value in parameters)
        and all(value.shape[0] == count for value in parameters)
    )


def spread_experts(module: nn.Module, name: str, axis: DeviceMesh, tensor_group: Group) -> None:
    """Keep this process's experts of a module, and send tokens to where theirs are.

    The processes of `tensor_group` hold the same tokens; `name` is the module's, for errors.
    """
    count: int = module.__dict__["num_experts"]
    if count % axis.size():
        raise UnevenError(f"policy.mesh.ep: {axis.size()} does not divide the {count} experts of {name}")
    try:
        inspect.signature(module.forward).bind(*("hidden_TD", "chosen_TK", "weights_TK"))
    except TypeError as error:
        raise PluginIncompatibleError(
            f"policy.mesh.ep: {name} is not called with tokens, the experts that each chose and their weights, and so "
            "its experts cannot be spread; set policy.mesh.ep = 1"
        ) from error
    for key in own_parameters(module):
        split_parameter(module, key, name, 0, axis)
    num_local = count // axis.size()
    module.num_experts = num_local  # type: ignore[assignment]
    group = axis.get_group()

    def around(
        inner: Callable[..., Any], hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        given = hidden_states, top_k_index, top_k_weights
        if tensor_group is None:
            return _dispatch(module, inner, group, *given)
        # Of rows that the group holds alike, each process computes its share, and the shares are joined.
        num_tokens = hidden_states.shape[0]
        missing = -num_tokens % tensor_group.size()
        hidden_TD, chosen_TK, weights_TK = (
            torch.cat((value, value.new_zeros(missing, value.shape[1]))) if missing else value for value in given
        )
        shares = (split_dim(hidden_TD, 0, tensor_group), part(chosen_TK, 0, tensor_group))
        output_TD = _dispatch(module, inner, group, *shares, split_dim(weights_TK, 0, tensor_group))
        joined_TD = gather_for_shared(output_TD, 0, tensor_group)
        # FSDP hangs its backward hook on the result, where an in-place change of a view would lose it.
        return joined_TD[:num_tokens].clone() if missing else joined_TD

    surround(module, around)


def _dispatch(  # noqa: PLR0917 - what transformers hands to experts, and where they are
    module: nn.Module,
    experts: Callable[..., torch.Tensor],
    group: dist.ProcessGroup,
    hidden_TD: torch.Tensor,
    chosen_TK: torch.Tensor,
    weights_TK: torch.Tensor,
) -> torch.Tensor:
    _, order_P, place_P = in_order(chosen_TK)
    send, receive, expert_R = _plan_route(chosen_TK, module.__dict__["num_experts"], group)
    rows_RD = all_to_all(permuted(hidden_TD, order_P, place_P, chosen_TK.shape[1]), group, receive, send)
    with substituted(module, local_parameters(module)):
        results_RD = _run(experts, rows_RD, expert_R)
    returned_PD = all_to_all(results_RD, group, send, receive)
    return weighed(returned_PD, order_P, place_P, weights_TK).to(hidden_TD.dtype)


def _plan_route(
    chosen_TK: torch.Tensor, num_local: int, group: dist.ProcessGroup
) -> tuple[list[int], list[int], torch.Tensor]:
    """Pairs for each process, rows from each, local experts of these [R]."""
    chosen_P = chosen_TK.flatten()
    # Not `bincount`, for which the CPU waits for an accelerator.
    counts = chosen_P.new_zeros(num_local * group.size()).scatter_add_(0, chosen_P, torch.ones_like(chosen_P))
    counts = counts.view(group.size(), num_local)
    arriving = torch.empty_like(counts)
    dist.all_to_all_single(arriving, counts, group=group)
    send, receive = torch.stack((counts.sum(1), arriving.sum(1))).tolist()
    expert_E = torch.arange(num_local, device=chosen_P.device).repeat(group.size())
    expert_R = expert_E.repeat_interleave(arriving.flatten(), output_size=sum(receive))
    return send, receive, expert_R


def _run(experts: Callable[..., torch.Tensor], rows_RD: torch.Tensor, expert_R: torch.Tensor) -> torch.Tensor:
    """The local experts, each row weighted by one. Without rows one of zeros runs, so that weights get a gradient."""
    num_rows = rows_RD.shape[0]
    if num_rows == 0:
        rows_RD = torch.cat((rows_RD, rows_RD.new_zeros(1, rows_RD.shape[1])))
        expert_R = expert_R.new_zeros(1)
    ones = rows_RD.new_ones(rows_RD.shape[0], 1)
    return experts(rows_RD, expert_R[:, None], ones)[:num_rows]
