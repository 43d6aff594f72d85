"""Each product against the same quantisation written out in float64."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from cosmos_core.config.schema import MeshConfig
from cosmos_core.models.parallel import float8
from cosmos_core.models.parallel.float8 import (
    E4M3,
    E5M2,
    compute_in_float8,
    float8_product,
    multiply,
    multiply_grouped,
    quantise,
    why_not_experts,
)
from cosmos_core.models.parallel.grouped import GROUPED, grouped_loop, grouped_product
from cosmos_core.models.parallel.tensor import Tensor, apply_style
from cosmos_core.policy.mesh.mesh import form_mesh
from cosmos_core.testing.worlds import run_world

TOKENS, INPUTS, OUTPUTS = 13, 48, 32


def grid(dtype):
    """Every finite value of a format, by its bytes."""
    every = torch.arange(256, dtype=torch.uint8).view(dtype).double()
    return every[every.isfinite()].unique()


def rounded(tensor, dtype, dim):
    """Divided by the largest magnitude over `dim`, rounded to the nearest value of the format, ties to even bytes."""
    largest = tensor.abs().amax() if dim is None else tensor.abs().amax(dim, keepdim=True)
    values = grid(dtype)
    scale = (largest.float() / float(values.max())).double()
    wanted = (tensor.float() / scale.float()).double()
    distance = (wanted[..., None] - values).abs()
    nearest = distance.amin(-1, keepdim=True)
    ties = distance == nearest
    # Of two values as near, the one whose byte is even.
    even = (values.to(dtype).view(torch.uint8) % 2 == 0).expand_as(ties)
    chosen = torch.where(ties.sum(-1, keepdim=True) > 1, ties & even, ties)
    return (chosen * values).sum(-1) * scale


def reference(scaling, hidden, weight, grad):
    if scaling == "tensorwise":
        x, w, g = rounded(hidden, E4M3, None), rounded(weight, E4M3, None), rounded(grad, E5M2, None)
        return x @ w.T, g @ w, g.T @ x
    return (
        rounded(hidden, E4M3, 1) @ rounded(weight, E4M3, 1).T,
        rounded(grad, E4M3, 1) @ rounded(weight, E4M3, 0),
        rounded(grad, E4M3, 0).T @ rounded(hidden, E4M3, 0),
    )


def operands():
    generator = torch.Generator().manual_seed(3)
    # Rows and columns of very different sizes, which one scale a tensor treats unlike one a row.
    sizes = torch.logspace(-3, 1, TOKENS)[:, None]
    hidden = torch.randn(TOKENS, INPUTS, generator=generator) * sizes
    weight = torch.randn(OUTPUTS, INPUTS, generator=generator) * torch.logspace(-2, 0, INPUTS)
    grad = torch.randn(TOKENS, OUTPUTS, generator=generator) * sizes.flip(0) * 1e-3
    return hidden, weight, grad


def layer_with(weight, *, bias=False):
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias)
    with torch.no_grad():
        linear.weight.copy_(weight)
    return linear


def test_the_three_products(subtests):
    for scaling in ["tensorwise", "rowwise"]:
        with subtests.test(scaling=scaling):
            hidden, weight, grad = operands()
            linear = layer_with(weight)
            compute_in_float8(linear, scaling)
            entered = hidden[None].clone().requires_grad_()
            result = linear(entered)
            result.backward(grad[None])
            found = result[0], entered.grad[0], linear.weight.grad
            exact = {"result": hidden @ weight.T, "hidden": grad @ weight, "weight": grad.T @ hidden}
            for name, one, expected in zip(
                ("result", "hidden", "weight"), found, reference(scaling, *operands()), strict=True
            ):
                assert (one.double() - expected).abs().max() <= 1e-5 * expected.abs().max(), name
                assert (one - exact[name]).norm() > 1e-3 * exact[name].norm(), name


def test_scales_of_a_row_keep_small_rows():
    hidden, weight, _ = operands()
    hidden[0] /= 100
    exact = hidden.double() @ weight.double().T

    def error(scaling):
        product = multiply(quantise(hidden, E4M3, scaling), quantise(weight, E4M3, scaling), torch.float32)
        return ((product - exact).norm(dim=1) / exact.norm(dim=1))[0]

    assert error("rowwise") < 0.05
    assert error("tensorwise") > 0.2


def test_a_bias_and_autocast():
    torch.manual_seed(0)
    linear = layer_with(torch.randn(OUTPUTS, INPUTS), bias=True)
    nn.init.normal_(linear.bias, std=10.0)  # without it the result is another one altogether
    plain = layer_with(linear.weight, bias=True)
    plain.load_state_dict(linear.state_dict())
    compute_in_float8(linear, "rowwise")
    hidden = torch.randn(5, INPUTS)
    with torch.autocast("cpu", torch.bfloat16):
        found = linear(hidden)
    assert found.dtype == torch.bfloat16
    expected = plain(hidden)
    assert (found - expected).norm() < 0.06 * expected.norm()
    assert linear(hidden).dtype == torch.float32


def test_what_is_not_finite_stays_so(subtests):
    for scaling in ["tensorwise", "rowwise"]:
        for bad in [float("inf"), float("nan")]:
            with subtests.test(scaling=scaling, bad=bad):
                linear = layer_with(torch.randn(OUTPUTS, INPUTS))
                compute_in_float8(linear, scaling)
                hidden = torch.randn(4, INPUTS)
                hidden[2, 7] = bad
                assert not linear(hidden)[2].isfinite().any()


def test_zeros_and_no_rows(subtests):
    for scaling in ["tensorwise", "rowwise"]:
        with subtests.test(scaling=scaling):
            linear = layer_with(torch.zeros(OUTPUTS, INPUTS))
            compute_in_float8(linear, scaling)
            assert torch.equal(linear(torch.zeros(3, INPUTS)), torch.zeros(3, OUTPUTS))
            assert linear(torch.zeros(0, INPUTS)).shape == (0, OUTPUTS)


@pytest.mark.parametrize("kind", ["tensorwise", "rowwise", "experts"])
def test_a_frozen_weight_gets_no_gradient_and_what_it_multiplies_is_not_kept(kind):
    linear = layer_with(torch.randn(OUTPUTS, INPUTS)).requires_grad_(requires_grad=False)
    if kind == "experts":
        matrices, ends = linear.weight.T[None], torch.tensor([4], dtype=torch.int32)
        linear.forward = lambda hidden: float8_product(hidden, matrices, ends)
    else:
        compute_in_float8(linear, kind)
    hidden, kept = torch.randn(4, INPUTS, requires_grad=True), []
    with torch.autograd.graph.saved_tensors_hooks(lambda each: kept.append(each.shape) or each, lambda each: each):
        result = linear(hidden)
    result.sum().backward()
    assert linear.weight.grad is None
    assert hidden.grad.abs().sum() > 0
    assert hidden.shape not in kept


def split(styles, scaling):
    return [split_one(style, scaling) for style in styles]


def split_one(style, scaling):
    hidden, weight, grad = operands()
    linear = layer_with(weight)
    compute_in_float8(linear, scaling)
    axis = Tensor(mesh=form_mesh(MeshConfig(tp=2), "cpu").axis("tp"))
    apply_style(linear, "linear", style, axis)
    rank = axis.mesh.get_local_rank()
    outer = style == "rowwise"
    entered = (hidden.chunk(2, 1)[rank] if outer else hidden).clone().requires_grad_()
    result = linear(entered)
    result.backward(grad if outer else grad.chunk(2, 1)[rank])
    return result.detach(), entered.grad, linear.weight.grad.to_local()


def test_tensor_parallel_layers_have_the_scales_of_whole_ones(subtests):
    for scaling in ["tensorwise", "rowwise"]:
        with subtests.test(scaling=scaling):
            expected = reference(scaling, *operands())
            styles = {"colwise": (1, None, 0), "rowwise": (None, 1, 1)}
            parts = run_world(2, split, list(styles), scaling)
            for (style, dims), *pair in zip(styles.items(), *parts, strict=True):
                for name, dim, one, two, whole in zip(
                    ("result", "hidden", "weight"), dims, *pair, expected, strict=True
                ):
                    found = one if dim is None else torch.cat([one, two], dim)
                    assert (found.double() - whole).abs().max() <= 1e-5 * whole.abs().max(), (style, name)


ENDS = torch.tensor([0, 4, 4, TOKENS], dtype=torch.int32)
"""Of four experts the first and the third have no rows."""


def of_experts():
    hidden, weight, grad = operands()
    draw = torch.Generator().manual_seed(5)
    matrices = weight.T * torch.randn(len(ENDS), INPUTS, OUTPUTS, generator=draw)
    return hidden.requires_grad_(), matrices.requires_grad_(), grad


def products(product):
    hidden, matrices, grad = of_experts()
    result = product(hidden, matrices, ENDS)
    result.backward(grad)
    return {"result": result.detach(), "rows": hidden.grad, "matrices": matrices.grad}


def test_experts():
    """All products against the same quantisation in float64; the weights' gradient is not quantised."""
    exact, found = products(grouped_product), products(float8_product)
    hidden, matrices, grad = (each.detach() for each in of_experts())
    by_row, of_result = rounded(matrices, E4M3, 2), rounded(matrices, E4M3, 1)
    expected = {
        "result": grouped_loop(rounded(hidden, E4M3, 1), of_result, ENDS),
        "rows": grouped_loop(rounded(grad, E4M3, 1), by_row.transpose(1, 2), ENDS),
    }
    for name, wanted in expected.items():
        assert (found[name].double() - wanted).abs().max() <= 1e-5 * wanted.abs().max(), name
        assert 1e-3 < (found[name] - exact[name]).norm() / exact[name].norm() < 0.06, name
    assert torch.equal(found["matrices"], exact["matrices"])


def scaled_grouped_mm(left, right, left_scale, right_scale, offs, **options):
    """What the operator of CUDA is documented to give; by its own rules of dtypes, shapes and strides."""
    given = left, right, left_scale, right_scale
    torch.ops.aten._scaled_grouped_mm(*(each.to("meta") for each in given), offs.to("meta"), **options)
    product = grouped_loop(left.float(), right.float() * right_scale[:, None], offs)
    return (product * left_scale[:, None]).to(options["out_dtype"])


def test_the_operator_of_cuda_gives_the_same(monkeypatch):
    expected = products(float8_product)
    monkeypatch.setattr(float8, "_lacks_kernels", lambda _: False)
    monkeypatch.setattr(torch, "_scaled_grouped_mm", scaled_grouped_mm)
    for name, found in products(float8_product).items():
        # The operator's results are bfloat16.
        torch.testing.assert_close(found, expected[name], rtol=2**-8, atol=1e-6)


def test_the_operator_of_cuda_knows_the_call(monkeypatch):
    monkeypatch.setattr(float8, "_lacks_kernels", lambda _: False)
    # Not every build of torch knows CUDA's tensors, even without storage.
    device = torch.device("cpu" if torch.version.cuda is None else "cuda")
    with FakeTensorMode(), torch.no_grad():
        rows = torch.empty(TOKENS, INPUTS, dtype=torch.bfloat16, device=device)
        matrices = torch.empty(len(ENDS), OUTPUTS, INPUTS, dtype=torch.bfloat16, device=device)
        ends = torch.empty(len(ENDS), dtype=torch.int32, device=device)
        result = float8_product(rows, matrices.transpose(1, 2), ends)
        assert (result.shape, result.dtype, result.device.type) == ((TOKENS, OUTPUTS), torch.bfloat16, device.type)
        back = multiply_grouped(
            quantise(result, E4M3, "rowwise"), quantise(matrices.transpose(1, 2), E4M3, "rowwise"), ends, result.dtype
        )
        assert back.shape == rows.shape


@pytest.mark.parametrize(
    ("scaling", "width", "capability", "reason"),
    [
        ("rowwise", 32, (9, 0), ""),
        ("rowwise", 32, None, ""),
        ("tensorwise", 32, (9, 0), "scaling = 'rowwise'"),
        ("rowwise", 24, (9, 0), r"\[24, 48\] are no multiples of 16"),
        ("rowwise", 32, (10, 0), "10.0, not 9.0"),
    ],
)
def test_experts_that_stay_in_the_compute_dtype(monkeypatch, scaling, width, capability, reason):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    with torch.device("meta"):
        sizes = {"moe_intermediate_size": width, "hidden_size": 2 * width}
        experts = Qwen3MoeExperts(Qwen3MoeConfig(experts_implementation=GROUPED, **sizes))
    found = why_not_experts(experts, scaling, torch.device("cpu" if capability is None else "cuda"))
    assert bool(found) == bool(reason)
    assert re.search(reason, found)
