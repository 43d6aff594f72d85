import torch

from cosmos_core.protocols import TensorSlice
from cosmos_core.weights.arrivals import Arrivals
from cosmos_core.weights.digest import tensor_digests

TENSORS = {"a": torch.arange(24.0).view(6, 4), "b": torch.ones(3)}
HALVES = (
    TensorSlice(name="a", start=(0, 0), shape=(6, 2)),
    TensorSlice(name="a", start=(0, 2), shape=(6, 2)),
    TensorSlice(name="b", start=(0,), shape=(3,)),
)
LAYOUT = {0: [(HALVES[0], "float32"), (HALVES[2], "float32")], 1: [(HALVES[1], "float32"), (HALVES[2], "float32")]}


def content(piece):
    index = tuple(slice(first, first + count) for first, count in zip(piece.start, piece.shape, strict=True))
    return TENSORS[piece.name][index]


def arrived(pieces, **changed):
    arrivals = Arrivals(tensor_digests(TENSORS), LAYOUT)
    for piece in pieces:
        arrivals.add(piece, content(piece) + changed.get(piece.name, 0.0))
    return arrivals.first_wrong()


def test_slices_of_several_ranks_add_up_and_those_that_both_get_count_once():
    parts = [TensorSlice(name="a", start=(row, 2), shape=(3, 2)) for row in (3, 0)]
    assert arrived([HALVES[0], HALVES[2], *parts, HALVES[2]]) is None


def test_the_first_wrong_tensor_is_named():
    assert arrived([*HALVES, HALVES[2]], b=1.0) == "b"
    assert arrived(HALVES, a=1.0, b=1.0) == "a"


def test_of_what_did_not_arrive_whole_nothing_is_said():
    assert arrived(HALVES[1:], a=1.0) is None
