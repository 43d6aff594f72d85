from __future__ import annotations

import pytest
import torch

from cosmos_core.errors import WeightSyncError
from cosmos_core.protocols import TensorSlice
from cosmos_core.rollout.serving.updates import Update, whole_layout
from cosmos_core.weights.shards import canonical_tensors


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(3, 4, bias=False)
        self.second = torch.nn.Linear(3, 4, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("scale", torch.ones(2))
        self.register_buffer("table", torch.ones(5), persistent=False)
        self.register_buffer("count", torch.zeros(1, dtype=torch.int64))


def chunk(name, start, shape):
    return TensorSlice(name=name, start=tuple(start), shape=tuple(shape))


def test_tied_parameters_count_once_and_persistent_float_buffers_too():
    tensors = canonical_tensors(Tied())
    assert sorted(tensors) == ["first.weight", "scale"]
    assert whole_layout(tensors) == [
        (chunk("first.weight", (0, 0), (4, 3)), "float32"),
        (chunk("scale", (0,), (2,)), "float32"),
    ]


def test_slices_are_put_in_their_place():
    tensors = {"w": torch.zeros(4, 3)}
    update = Update(1, tensors)
    whole = torch.arange(12.0).view(4, 3)
    update.write(chunk("w", (0, 0), (4, 1)), whole[:, :1])
    update.write(chunk("w", (0, 1), (1, 2)), whole[:1, 1:])
    update.write(chunk("w", (1, 1), (3, 2)), whole[1:, 1:])
    update.check()
    update.apply()
    torch.testing.assert_close(tensors["w"], whole, atol=0, rtol=0)


def test_a_hole_is_found():
    for boxes in [
        [],
        [((0, 0), (4, 2))],
        [((0, 0), (3, 3))],
        [((0, 0), (4, 1)), ((0, 2), (4, 1))],
        [((0, 0), (2, 3)), ((2, 0), (2, 2)), ((0, 0), (3, 3))],
    ]:
        update = Update(3, {"w": torch.zeros(4, 3), "v": torch.zeros(1)})
        update.write(chunk("v", (0,), (1,)), torch.zeros(1))
        for start, shape in boxes:
            update.write(chunk("w", start, shape), torch.zeros(shape))
        with pytest.raises(WeightSyncError, match=r"update to version 3: 1 of 2 tensors are not wholly written.*'w'"):
            update.check()


def test_a_scalar_is_covered_by_its_only_slice():
    update = Update(1, {"s": torch.zeros(())})
    with pytest.raises(WeightSyncError):
        update.check()
    update.write(chunk("s", (), ()), torch.tensor(2.0))
    update.check()


def test_what_does_not_fit_is_refused_at_once():
    for written, data, message in [
        (chunk("x", (0,), (1,)), torch.zeros(1), "'x' is not a tensor of this model"),
        (chunk("w", (0, 0), (4, 3)), torch.zeros(3, 4), r"data of shape \(3, 4\) for a slice of \(4, 3\)"),
        (chunk("w", (1, 0), (4, 3)), torch.zeros(4, 3), r"at \(1, 0\) is not in a tensor of \(4, 3\)"),
        (chunk("w", (0,), (4,)), torch.zeros(4), "is not in a tensor"),
        (chunk("w", (-1, 0), (4, 3)), torch.zeros(4, 3), "is not in a tensor"),
    ]:
        with pytest.raises(WeightSyncError, match=message):
            Update(1, {"w": torch.zeros(4, 3)}).write(written, data)
