"""Each product against the same quantisation written out in float64."""

from __future__ import annotations

import torch
from torch import nn

from cosmos_core.config.schema import MeshConfig
from cosmos_core.models.parallel.float8 import E4M3, E5M2, compute_in_float8, multiply, quantise
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


def test_a_frozen_weight_gets_no_gradient():
    linear = layer_with(torch.randn(OUTPUTS, INPUTS)).requires_grad_(requires_grad=False)
    compute_in_float8(linear, "tensorwise")
    hidden = torch.randn(4, INPUTS, requires_grad=True)
    linear(hidden).sum().backward()
    assert linear.weight.grad is None
    assert hidden.grad.abs().sum() > 0


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
