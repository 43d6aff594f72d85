"""Codes and scales against a reference in float64 that looks for the nearest code among all of them."""

import itertools
import math

import numpy as np
import pytest
import torch

from cosmos_core.errors import WeightSyncError
from cosmos_core.protocols.quantization import FORMATS
from cosmos_core.weights import quantization
from cosmos_core.weights.quantization import dequantise, dequantised_rows, quantise, quantise_tensors

torch.set_num_threads(1)

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
E4M3 = [
    (mantissa / 8) * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    for exponent, mantissa in itertools.product(range(16), range(8))
][:-1]


def rounded(value, points):
    """The nearest of some points of ascending codes, ties to the even code, what is beyond the last to the last."""
    size = abs(float(value))
    distances = [abs(size - point) for point in points]
    best = min(range(len(points)), key=lambda code: (distances[code], code % 2))
    return math.copysign(points[best], value)


def reference(form, matrix):
    """Dequantised in float64, block by block."""
    found = np.zeros(matrix.shape)
    largest = float(np.abs(matrix).max(initial=0.0))
    tensor_scale = np.float32(largest) / np.float32(448 * 6)
    for row, values in enumerate(matrix):
        block = form.block or len(values)
        for first in range(0, len(values), block):
            part = values[first : first + block].astype(np.float64)
            most = float(np.abs(part).max())
            if most == 0:
                continue
            points = E2M1 if form.per_byte == 2 else E4M3
            if form.name == "fp8":
                scale = float(np.float32(most) / np.float32(448))
            elif form.name == "nvfp4":
                inner = np.float32(most) / np.float32(6) / tensor_scale
                scale = float(np.float32(rounded(max(float(inner), 2.0**-6), E4M3)) * tensor_scale)
            else:
                scale = 2.0 ** (math.floor(math.log2(most)) - (8 if form.name == "mxfp8" else 2))
            # The quotient is rounded to float32 as it is anywhere: ties are those of what is divided.
            quotients = [float(np.float32(value) / np.float32(scale)) if scale else 0.0 for value in part]
            found[row, first : first + block] = [rounded(each, points) * scale for each in quotients]
    return found


def matrix_of(rows, columns, seed=0):
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(rows, columns, generator=generator)
    # Rows of very different sizes, a row of zeros, and a row of ties.
    weights *= torch.logspace(-9, 3, rows)[:, None]
    weights[1] = 0.0
    weights[2] = torch.tensor([6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25, -5.0, -0.0]).repeat(columns)[:columns]
    return weights


def round_trip(form, matrix):
    return dequantise(form, "w", quantise(form, "w", matrix), matrix.shape[-1])


def test_elements_are_rounded_to_the_nearest_code(subtests):
    for columns, name in itertools.product((96, 32, 33, 5, 1), FORMATS):
        with subtests.test(columns=columns, name=name):
            form, matrix = FORMATS[name], matrix_of(12, columns)
            found = round_trip(form, matrix)
            expected = reference(form, matrix.numpy())
            # The product of code and scale is rounded to float32.
            assert np.allclose(found.numpy(), expected, rtol=2e-7, atol=1e-44)
            assert found[1].abs().max() == 0


def test_tensors_have_the_dtypes_shapes_and_bytes_of_the_format(subtests):
    for name in FORMATS:
        with subtests.test(name=name):
            form = FORMATS[name]
            for shape in ((6, 64), (5, 33), (3, 4, 48), (2, 3, 31)):
                made = quantise(form, "layer.w", torch.randn(shape))
                facts = {key: (str(t.dtype).removeprefix("torch."), tuple(t.shape)) for key, t in made.items()}
                assert facts == form.tensors("layer.w", shape)
                assert sum(tensor.nbytes for tensor in made.values()) == form.nbytes(shape)


def test_errors_are_as_large_as_the_formats_have(subtests):
    for name, error in [("fp8", 0.0264), ("mxfp8", 0.029), ("mxfp4", 0.115), ("nvfp4", 0.095)]:
        with subtests.test(name=name, error=error):
            matrix = torch.randn(256, 1024, generator=torch.Generator().manual_seed(0))
            found = round_trip(FORMATS[name], matrix)
            assert ((found - matrix).norm() / matrix.norm()).item() == pytest.approx(error, rel=0.02)


def test_what_is_quantised_stays_as_it_is(subtests):
    for name in ["mxfp8", "mxfp4"]:
        with subtests.test(name=name):
            form, matrix = FORMATS[name], matrix_of(12, 80)
            first = quantise(form, "w", matrix)
            again = quantise(form, "w", dequantise(form, "w", first, 80))
            assert all(torch.equal(first[key].view(torch.uint8), again[key].view(torch.uint8)) for key in first)


def test_codes_of_what_is_quantised_stay_though_a_float32_scale_may_move_by_a_rounding(subtests):
    for name in ["fp8", "nvfp4"]:
        with subtests.test(name=name):
            form, matrix = FORMATS[name], matrix_of(12, 80)
            once = round_trip(form, matrix)
            assert torch.allclose(round_trip(form, once), once, rtol=3e-7, atol=0)


def test_each_expert_is_a_matrix_of_its_own(subtests):
    for name in FORMATS:
        with subtests.test(name=name):
            form = FORMATS[name]
            experts = torch.randn(3, 4, 40) * torch.tensor([1e-3, 1.0, 50.0])[:, None, None]
            together = round_trip(form, experts)
            assert torch.equal(together, torch.stack([round_trip(form, expert) for expert in experts]))


def test_extremes_neither_overflow_nor_vanish(subtests):
    for name in FORMATS:
        with subtests.test(name=name):
            # A block of the last row has a scale below the smallest of nvfp4; an element is above half of its smallest.
            largest, in_nvfp4 = 3.4e38, 3.4e38 / 2688 * 2.0**-6 * 0.5
            values = {(0, 0): largest, (1, 40): -1e-45, (2, 3): 1e-38, (3, 5): 448.0, (4, 7): 0.6 * in_nvfp4}
            smallest = {"fp8": 2.0**-135, "mxfp8": 2.0**-136, "mxfp4": 2.0**-128, "nvfp4": in_nvfp4}[name]
            matrix = torch.zeros(5, 64)
            for place, value in values.items():
                matrix[place] = value
            found = round_trip(FORMATS[name], matrix).double()
            for place, value in values.items():
                assert abs(found[place].item() - value) <= max(0.25 * abs(value), 0.5 * smallest), place
                found[place] = 0.0
            assert not found.any()


def test_scales_of_nvfp4_are_normal_numbers_or_those_of_zeros():
    matrix = torch.zeros(1, 80)
    matrix[0, ::16] = torch.tensor([2688.0, 0.3 * 2**-6, 6 * 2.0**-8, 6 * 2.0**-5, 0.0])
    made = quantise(FORMATS["nvfp4"], "w", matrix)
    assert made["w::scale"].float().tolist() == [[448.0, 2.0**-6, 2.0**-6, 2.0**-5, 0.0]]
    assert dequantise(FORMATS["nvfp4"], "w", made, 80)[0, ::16].tolist() == [
        2688.0,
        2.0**-7,
        1.5 * 2**-6,
        6 * 2.0**-5,
        0,
    ]


def test_what_is_not_finite_is_refused_by_name(subtests):
    for bad, name in itertools.product([math.nan, math.inf, -math.inf], FORMATS):
        with subtests.test(bad=bad, name=name):
            matrix = torch.randn(4, 64)
            matrix[3, 63] = bad
            with pytest.raises(WeightSyncError, match=r"layers\.0\.w: it has elements that are not finite"):
                quantise(FORMATS[name], "layers.0.w", matrix)


def test_two_codes_share_a_byte_the_even_column_below():
    made = quantise(FORMATS["mxfp4"], "w", torch.tensor([[6.0, -0.5, 1.0]]))
    assert made["w"].tolist() == [[0x9 << 4 | 0x7, 0x2]]
    assert made["w::scale"].float().tolist() == [[1.0]]


def test_nothing_becomes_nothing(subtests):
    for name, shape in itertools.product(FORMATS, [(0, 4), (4, 0), (2, 0, 8)]):
        with subtests.test(name=name, shape=shape):
            form = FORMATS[name]
            made = quantise(form, "w", torch.zeros(shape))
            assert {key: tuple(tensor.shape) for key, tensor in made.items()} == {
                key: size for key, (_, size) in form.tensors("w", shape).items()
            }
            assert dequantise(form, "w", made, shape[-1]).shape == shape


def test_rows_one_after_another_are_those_of_the_whole(monkeypatch, subtests):
    for name in FORMATS:
        with subtests.test(name=name):
            monkeypatch.setitem(quantization._SCRATCH, "cpu", 50)
            form = FORMATS[name]
            for shape in ((9, 40), (5, 3, 32), (1, 8, 16)):
                made = quantise(form, "w", torch.randn(shape))
                whole, found = dequantise(form, "w", made, shape[-1]), torch.zeros(shape)
                steps = list(dequantised_rows(form, "w", made, shape[-1]))
                for rows, values in steps:
                    found[rows] = values
                assert torch.equal(found, whole)
                assert len(steps) > 1 or shape[0] == 1


def test_only_matrices_become_codes():
    tensors = {"a": torch.randn(4, 8), "norm": torch.ones(4)}
    made = quantise_tensors(FORMATS["fp8"], tensors, {"a": (4, 8)})
    assert list(made) == ["a", "a::scale", "norm"]
    assert made["norm"] is tensors["norm"]


def test_bfloat16_is_quantised_from_its_own_values():
    matrix = torch.randn(4, 64, dtype=torch.bfloat16)
    for form in FORMATS.values():
        assert torch.equal(round_trip(form, matrix), round_trip(form, matrix.float()))
