"""Experts as grouped products: rows in the order of their experts, each run of them times its expert's matrices.

transformers' experts modules call what is registered with it under `GROUPED`: while they train, in each process of `ep`
for the rows that arrive there, and in the embedded engine. Ends of runs stay on the device, so with bfloat16 on a GPU
that has the product (compute capability 9.0 or 10.0) the CPU waits for nothing; elsewhere there is a loop over experts.
Under autocast the products are in its dtype, which torch's own does not see to.

Shape legend: T tokens, K experts that each chose, D hidden size, P = T·K pairs, E experts, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, Final, TypeAlias

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

GROUPED: Final = "cosmos_grouped"
"""The name of `run_experts` among transformers' experts functions."""
PRODUCT: Final = "grouped_product"
"""The attribute of an experts module that holds its product, where it is not `grouped_product`."""

Product: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Rows [P, I] in the order of their experts, times matrices [E, I, O]; runs end at [E] (int32)."""


def run_experts(
    module: nn.Module, hidden_TD: torch.Tensor, chosen_TK: torch.Tensor, weights_TK: torch.Tensor
) -> torch.Tensor:
    """The weighted sum [T, D] of what the chosen experts make of each token, in the tokens' dtype."""
    own: Any = module
    kind, dtype = hidden_TD.device.type, own.down_proj.dtype
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
    expert_P, order_P, place_P = in_order(chosen_TK)
    every_E = torch.arange(own.num_experts, device=expert_P.device)
    ends_E = torch.searchsorted(expert_P, every_E, right=True, out_int32=True)

    def linear(name: str, rows_PI: torch.Tensor) -> torch.Tensor:
        matrices = getattr(own, name).to(dtype)
        product: Product = getattr(own, PRODUCT, grouped_product)
        result = product(rows_PI.to(dtype), matrices if own.is_transposed else matrices.transpose(1, 2), ends_E)
        return result + getattr(own, f"{name}_bias").to(dtype)[expert_P] if own.has_bias else result

    rows_PD = permuted(hidden_TD.to(dtype), order_P, place_P, chosen_TK.shape[1])
    # As transformers' own functions do.
    name, activate = ("gate_up_proj", own._apply_gate) if own.has_gate else ("up_proj", own.act_fn)  # noqa: SLF001
    results_PD = linear("down_proj", activate(linear(name, rows_PD)))
    return weighed(results_PD, order_P, place_P, weights_TK).to(hidden_TD.dtype)


def runs_grouped(module: nn.Module) -> bool:
    """Tell whether a module's forward is `run_experts`."""
    is_registered = hasattr(module, "down_proj") and hasattr(module, "is_transposed")
    return is_registered and module.config._experts_implementation == GROUPED  # type: ignore[union-attr] # noqa: SLF001


def in_order(chosen_TK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The experts of all pairs in their order, the pairs in this order, and the place of each pair in it: int64 [P]."""
    expert_P, order_P = chosen_TK.flatten().sort(stable=True)
    place_P = torch.empty_like(order_P)
    place_P[order_P] = torch.arange(len(place_P), device=place_P.device)
    return expert_P, order_P, place_P


def weighed(
    results_PD: torch.Tensor, order_P: torch.Tensor, place_P: torch.Tensor, weights_TK: torch.Tensor
) -> torch.Tensor:
    """The weighted sums [T, D] of results that lie in the order of their experts."""
    results_TKD = torch.unflatten(permuted(results_PD, place_P, order_P), 0, weights_TK.shape)
    return torch.sum(results_TKD * weights_TK[..., None], 1)


def permuted(rows_TD: torch.Tensor, to_P: torch.Tensor, back_P: torch.Tensor, copies: int = 1) -> torch.Tensor:
    """Rows [P, D] of so many copies of each row, reordered; `back_P` is the inverse of `to_P`."""
    result: torch.Tensor = _Permuted.apply(rows_TD, to_P, back_P, copies)  # type: ignore[no-untyped-call]
    return result


class _Permuted(torch.autograd.Function):
    """Gathers both ways: torch's own gradient adds up by atomic operations, in an order that differs each time."""

    @staticmethod
    def forward(ctx: Any, rows_TD: torch.Tensor, to_P: torch.Tensor, back_P: torch.Tensor, copies: int) -> torch.Tensor:
        ctx.save_for_backward(back_P)
        ctx.copies = copies
        return rows_TD.index_select(0, to_P // copies if copies > 1 else to_P)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_PD: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (back_P,) = ctx.saved_tensors
        grad = grad_PD.index_select(0, back_P)
        return grad if ctx.copies == 1 else torch.unflatten(grad, 0, (-1, ctx.copies)).sum(1), None, None, None


def grouped_product(rows_PI: torch.Tensor, matrices_EIO: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
    """The product of each run of rows with its matrix, [P, O]; see `Product`."""
    product = nn.functional.grouped_mm if matrices_EIO.dtype == torch.bfloat16 else grouped_loop
    return product(rows_PI, matrices_EIO, offs=ends_E)


@torch.library.custom_op("cosmos::grouped_loop", mutates_args=())
def grouped_loop(left: torch.Tensor, right: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """The product in other dtypes than bfloat16, which torch's compiler and tensors without storage do not know.

    Of [P, I] and [E, I, O] it is [P, O], and of [I, P] and [P, O] [E, I, O]. An accelerator is waited for.
    """
    ends = offs.tolist()
    runs = [slice(start, end) for start, end in pairwise([0, *ends])]
    with torch.autocast(left.device.type, enabled=False):
        if right.dim() == 2:
            return torch.stack([left[:, run] @ right[run] for run in runs])
        return torch.cat([left[run] @ matrix for run, matrix in zip(runs, right.unbind(), strict=True)])


@grouped_loop.register_fake
def _(left: torch.Tensor, right: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    runs = (len(offs),) if right.dim() == 2 else ()
    return left.new_empty(*runs, left.shape[0], right.shape[-1])


def _save(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:  # noqa: ARG001 - torch's signature
    ctx.save_for_backward(*inputs)


def _gradients(ctx: Any, grad_PO: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    rows_PI, matrices_EIO, ends_E = ctx.saved_tensors
    grad_PO, (of_rows, of_matrices, _) = grad_PO.contiguous(), ctx.needs_input_grad
    return (
        grouped_loop(grad_PO, matrices_EIO.transpose(1, 2), ends_E) if of_rows else None,
        grouped_loop(rows_PI.T, grad_PO, ends_E) if of_matrices else None,
        None,
    )


grouped_loop.register_autograd(_gradients, setup_context=_save)
ALL_EXPERTS_FUNCTIONS.register(GROUPED, run_experts)
