"""Linear layers and experts that compute in 8-bit floating point, forward and backward, scaled as operands are made.

Each operand of a product is divided by a scale that brings its largest element to the largest number of the format:
one scale a tensor, or one for each row along which the product sums. Where such a row is split over `tp`, the largest
element is that of all parts, so that numbers do not depend on the layout.

Source: arXiv:2209.05433 section 3 (formats; e5m2 for gradients under one scale a tensor). Deviation: under one scale a
row everything is e4m3, as rows of gradients span less than tensors of them. Of experts, which have one scale a row, the
weights' gradient stays in the compute dtype: it sums over rows of tokens, whose number differs from expert to expert.

Shape legend: T tokens, I inputs, O outputs of a layer; R rows of an operand, K what a product sums over; E experts, P
rows in the order of their experts.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from cosmos_core.config.problems import suggestion
from cosmos_core.errors import ConfigError
from cosmos_core.models.parallel.forwards import own_parameters, surround
from cosmos_core.models.parallel.grouped import PRODUCT, grouped_product, runs_grouped
from cosmos_core.models.parallel.tensor import INPUTS, OUTPUTS, applied_to
from cosmos_core.protocols import Layout

Scaling: TypeAlias = Literal["tensorwise", "rowwise"]
Side: TypeAlias = Literal["inputs", "outputs"]

E4M3: Final = torch.float8_e4m3fn
E5M2: Final = torch.float8_e5m2
MULTIPLE: Final = 16
"""Kernels of accelerators want every dimension to be a multiple of it."""
SMALLEST: Final = 1e-12
"""What an operand of zeros counts as, so that nothing is divided by zero."""


class Split(NamedTuple):
    """The side of a linear layer that is split, and the processes; of a kind that torch's compiler makes."""

    side: Side
    group: dist.ProcessGroup


class Quantised(NamedTuple):
    """An operand: `values` (8-bit) times `scale` (float32, [] or [R, 1]); of a kind that torch's compiler makes.

    Of experts there are E: [E, R, K] and [E, R, 1].
    """

    values_RK: torch.Tensor
    scale: torch.Tensor


def compute_in_float8(linear: nn.Linear, scaling: Scaling) -> None:
    """Make a linear layer's forward and backward multiply 8-bit numbers; its parameters stay as they are.

    Any weight that it is called with is taken, so tensor parallel styles go round this.
    """

    def around(inner: Any, hidden: torch.Tensor) -> torch.Tensor:
        if not hidden.numel():
            nothing: torch.Tensor = inner(hidden)
            return nothing
        dtype = hidden.dtype
        if torch.is_autocast_enabled(hidden.device.type):
            dtype = torch.get_autocast_dtype(hidden.device.type)
        flat_TI = hidden.to(dtype).flatten(0, -2)
        weight = linear.weight.to(dtype)
        product: torch.Tensor = _Linear.apply(flat_TI, weight, scaling, _split_of(linear))  # type: ignore[no-untyped-call]
        result = product.view(*hidden.shape[:-1], -1)
        return result if linear.bias is None else result + linear.bias.to(dtype)

    surround(linear, around)


def quantise(
    tensor_RK: torch.Tensor, dtype: torch.dtype, scaling: Scaling, group: dist.ProcessGroup | None = None
) -> Quantised:
    """An operand [R, K] in 8 bits; what is not finite makes what it touches not a number.

    A product sums over the last dimension. `group` holds the other parts of what a scale is for.
    """
    size = tensor_RK.abs()
    largest = (size.amax(dim=-1, keepdim=True) if scaling == "rowwise" else size.amax()).float()
    if group is not None:
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    limit = torch.finfo(dtype).max
    scale = largest.clamp_min(SMALLEST) / limit
    # A conversion to e4m3 makes not-a-number of what a rounded quotient has above the limit.
    return Quantised(values_RK=(tensor_RK.float() / scale).clamp(-limit, limit).to(dtype), scale=scale)


def multiply(left: Quantised, right: Quantised, dtype: torch.dtype) -> torch.Tensor:
    """`left @ right.T` of [M, K] and [N, K], summed in float32.

    A CPU multiplies the same 8-bit numbers as float32: its kernel for 8 bits is slower by orders of magnitude.
    """
    if _lacks_kernels(left):
        with torch.autocast("cpu", enabled=False):
            product = left.values_RK.float() @ right.values_RK.float().T
        return (product * left.scale * right.scale.reshape(1, -1)).to(dtype)
    rows, columns = left.values_RK.shape[0], right.values_RK.shape[0]
    is_rowwise = left.scale.dim() > 0
    # Kernels with a scale a row give bfloat16 only, and are fast only with the fast sum.
    result: torch.Tensor = torch._scaled_mm(  # noqa: SLF001 - torch has no public name for it
        _padded(left.values_RK),
        _padded(right.values_RK).T,
        scale_a=_padded_rows(left.scale) if is_rowwise else left.scale,
        scale_b=_padded_rows(right.scale).T if is_rowwise else right.scale,
        out_dtype=torch.bfloat16 if is_rowwise else dtype,
        use_fast_accum=is_rowwise or left.values_RK.dtype == right.values_RK.dtype == E4M3,
    )
    return result[:rows, :columns].to(dtype)


class _Linear(torch.autograd.Function):
    """`hidden @ weight.T` and both of its gradients."""

    @staticmethod
    def forward(
        ctx: Any, hidden_TI: torch.Tensor, weight_OI: torch.Tensor, scaling: Scaling, split: Split | None
    ) -> torch.Tensor:
        of_hidden, of_weight, *_ = ctx.needs_input_grad
        ctx.save_for_backward(hidden_TI if of_weight else None, weight_OI if of_hidden else None)
        ctx.scaling, ctx.split = scaling, split
        left = quantise(hidden_TI, E4M3, scaling, _group(split, "inputs"))
        right = quantise(weight_OI, E4M3, scaling, _group(split, "inputs" if scaling == "rowwise" else None))
        return multiply(left, right, hidden_TI.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TO: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden_TI, weight_OI = ctx.saved_tensors
        gradients = _tensorwise_gradients if ctx.scaling == "tensorwise" else _rowwise_gradients
        return *gradients(ctx, grad_TO, hidden_TI, weight_OI), None, None


def _tensorwise_gradients(
    ctx: Any, grad_TO: torch.Tensor, hidden_TI: torch.Tensor, weight_OI: torch.Tensor
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    grad = quantise(grad_TO, E5M2, "tensorwise", _group(ctx.split, "outputs"))
    of_hidden = of_weight = None
    if ctx.needs_input_grad[0]:
        weight = quantise(weight_OI, E4M3, "tensorwise", _group(ctx.split, None))
        of_hidden = multiply(grad, _transposed(weight), grad_TO.dtype)
    if ctx.needs_input_grad[1]:
        hidden = quantise(hidden_TI, E4M3, "tensorwise", _group(ctx.split, "inputs"))
        of_weight = multiply(_transposed(grad), _transposed(hidden), grad_TO.dtype)
    return of_hidden, of_weight


def _rowwise_gradients(
    ctx: Any, grad_TO: torch.Tensor, hidden_TI: torch.Tensor, weight_OI: torch.Tensor
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    of_hidden = of_weight = None
    if ctx.needs_input_grad[0]:
        group = _group(ctx.split, "outputs")
        grad = quantise(grad_TO, E4M3, "rowwise", group)
        of_hidden = multiply(grad, quantise(weight_OI.T, E4M3, "rowwise", group), grad_TO.dtype)
    if ctx.needs_input_grad[1]:
        grad = quantise(grad_TO.T, E4M3, "rowwise")
        of_weight = multiply(grad, quantise(hidden_TI.T, E4M3, "rowwise"), grad_TO.dtype)
    return of_hidden, of_weight


def multiply_grouped(left: Quantised, right: Quantised, ends_E: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Runs of rows [P, K], each times its expert's of [E, N, K], transposed; runs end at [E] (int32). Gives [P, N].

    A CPU multiplies the same 8-bit numbers as float32.
    """
    if _lacks_kernels(left):
        matrices_EKN = (right.values_RK.float() * right.scale).transpose(1, 2)
        return (grouped_product(left.values_RK.float(), matrices_EKN, ends_E) * left.scale).to(dtype)
    return torch._scaled_grouped_mm(  # noqa: SLF001 - torch has no public name for it
        left.values_RK.contiguous(),
        right.values_RK.contiguous().transpose(1, 2),
        left.scale.flatten(),
        right.scale.flatten(1).contiguous(),
        offs=ends_E,
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    ).to(dtype)


def float8_product(rows_PI: torch.Tensor, matrices_EIO: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
    """The product of experts (see `grouped.Product`) in 8 bits, as is the gradient of the rows."""
    product: torch.Tensor = _Experts.apply(rows_PI, matrices_EIO, ends_E)  # type: ignore[no-untyped-call]
    return product


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_PI: torch.Tensor, matrices_EIO: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
        of_rows, of_matrices, _ = ctx.needs_input_grad
        ctx.save_for_backward(rows_PI if of_matrices else None, matrices_EIO if of_rows else None, ends_E)
        right = quantise(matrices_EIO.transpose(1, 2), E4M3, "rowwise")
        return multiply_grouped(quantise(rows_PI, E4M3, "rowwise"), right, ends_E, rows_PI.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_PO: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows_PI, matrices_EIO, ends_E = ctx.saved_tensors
        of_rows = of_matrices = None
        if ctx.needs_input_grad[0]:
            right = quantise(matrices_EIO, E4M3, "rowwise")
            of_rows = multiply_grouped(quantise(grad_PO, E4M3, "rowwise"), right, ends_E, grad_PO.dtype)
        if ctx.needs_input_grad[1]:
            of_matrices = grouped_product(rows_PI.T, grad_PO.contiguous(), ends_E)
        return of_rows, of_matrices, None


def _split_of(linear: nn.Linear) -> Split | None:
    if (applied := applied_to(linear)) is None or applied.style not in OUTPUTS | INPUTS:
        return None
    return Split(side="outputs" if applied.style in OUTPUTS else "inputs", group=applied.group)


def _group(split: Split | None, side: Side | None) -> dist.ProcessGroup | None:
    """The group to ask for the largest element of what spans a side of the layer; both sides, if None."""
    return split.group if split is not None and side in (None, split.side) else None


def _lacks_kernels(operand: Quantised) -> bool:
    return operand.values_RK.device.type == "cpu"


def _transposed(operand: Quantised) -> Quantised:
    return Quantised(values_RK=operand.values_RK.T, scale=operand.scale)


def _padded(values_RK: torch.Tensor) -> torch.Tensor:
    """With zeros up to multiples of 16 along both dimensions, which change no sum; rows lie together."""
    rows, columns = (-size % MULTIPLE for size in values_RK.shape)
    if not rows and not columns:
        return values_RK.contiguous()
    # Zero is the byte 0, and bytes are what padding knows.
    return nn.functional.pad(values_RK.view(torch.uint8), (0, columns, 0, rows)).view(values_RK.dtype)


def _padded_rows(scale_R1: torch.Tensor) -> torch.Tensor:
    return nn.functional.pad(scale_R1, (0, 0, 0, -scale_R1.shape[0] % MULTIPLE), value=1.0)


_LOG: Final = logging.getLogger(__name__)

EXPERTS_CAPABILITY: Final = (9, 0)
"""Of the only CUDA devices that have the product of experts with a scale a row: later ones lack its instructions."""
LEAST_CAPABILITY: Final[Mapping[str, tuple[int, int]]] = {"tensorwise": (8, 9), "rowwise": (9, 0)}
"""Of a CUDA device that has the products."""


def install_float8(module: PreTrainedModel, layout: Layout, device: torch.device) -> None:
    """Make linear layers and experts of the decoder, and the output layer, compute in 8 bits, but for those to skip.

    Comes before anything that splits them. Other parts, such as a vision tower, stay as they are.
    """
    if layout.float8 == "none":
        return
    for name, child in candidates(module).items():
        if not is_computed(name, layout.float8_skip):
            continue
        if isinstance(child, nn.Linear):
            compute_in_float8(child, layout.float8)
        elif not why_not_experts(child, layout.float8, device):
            setattr(child, PRODUCT, float8_product)


def why_not_experts(module: nn.Module, scaling: str, device: torch.device) -> str:
    """The reason for which experts stay in the compute dtype; empty if they compute in 8 bits."""
    if scaling != "rowwise":
        return "their product takes scaling = 'rowwise'"
    widths = sorted({size for each in own_parameters(module).values() if each.dim() == 3 for size in each.shape[1:]})
    if any(width % MULTIPLE for width in widths):
        return f"their widths {widths} are no multiples of {MULTIPLE}"
    if device.type != "cuda":
        return ""
    have = torch.cuda.get_device_capability(device)
    need = ".".join(map(str, EXPERTS_CAPABILITY))
    return "" if have == EXPERTS_CAPABILITY else f"the device has compute capability {have[0]}.{have[1]}, not {need}"


def check_float8(module: PreTrainedModel, layout: Layout, device: torch.device) -> None:
    """Refuse what cannot be computed in 8 bits, before anything is built."""
    if layout.float8 == "none":
        return
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < LEAST_CAPABILITY[layout.float8]:
        have, need = (".".join(map(str, each)) for each in (
            torch.cuda.get_device_capability(device), LEAST_CAPABILITY[layout.float8]
        ))  # fmt: skip
        raise ConfigError(
            f"policy.float8.scaling: {layout.float8!r} needs an accelerator of compute capability {need} or more, "
            f"and {torch.cuda.get_device_name(device)} has {have}; set it to 'none'"
        )
    found = candidates(module)
    if problems := list(skip_problems(layout.float8_skip, found, type(module).__name__)):
        raise ConfigError("\n".join(problems))
    chosen = [name for name in found if is_computed(name, layout.float8_skip)]
    linear = [name for name in found if isinstance(found[name], nn.Linear)]
    skipped = sorted({name.rpartition(".")[2] for name in found if name not in chosen})
    _LOG.info(
        "float8, %s: %d of %d linear layers%s",
        layout.float8, len({*linear} & {*chosen}), len(linear), f"; not {', '.join(skipped)}" if skipped else "",
    )  # fmt: skip
    experts = [found[name] for name in chosen if name not in linear]
    if experts and (reason := why_not_experts(experts[0], layout.float8, device)):
        _LOG.warning("float8: experts stay in policy.precision: %s", reason)
    elif experts:
        _LOG.info("float8: so do the experts of %d layers; their weights' gradient does not", len(experts))


def candidates(module: PreTrainedModel) -> dict[str, nn.Module]:
    """Linear layers and experts of the decoder, and the output layer, by name."""
    inside = {*module.get_decoder().modules(), module.get_output_embeddings()}
    found = {name: child for name, child in module.named_modules() if child in inside}
    return {name: child for name, child in found.items() if isinstance(child, nn.Linear) or runs_grouped(child)}


def skip_problems(skip: Sequence[str], names: Collection[str], architecture: str) -> Iterator[str]:
    """Faults of `policy.float8.skip`: a part of no name, or of so many that no layer is left."""
    known = {part for name in names for part in name.split(".") if not part.isdecimal()}
    for wanted in skip:
        if not any(wanted in name for name in names):
            yield (
                f"policy.float8.skip: no linear layer of {architecture} has {wanted!r} in its name; "
                f"{suggestion(wanted, known)}"
            )
    if not any(is_computed(name, skip) for name in names):
        yield (
            f"policy.float8.skip: {list(skip)} leaves none of the {len(names)} linear layers of {architecture} to "
            "compute in 8 bits; skip fewer, or set policy.float8.scaling = 'none'"
        )


def is_computed(name: str, skip: Sequence[str]) -> bool:
    """Tell whether the linear layer, or the experts, of this name compute in 8 bits, where some do."""
    return not any(part in name for part in skip)
