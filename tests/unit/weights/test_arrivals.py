import itertools

import torch

from cosmos_core.protocols import TensorSlice
from cosmos_core.weights import slices
from cosmos_core.weights.digest import Arrivals, tensor_digests

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


def check(layout, wrong=(), left_out=()):
    """The verdict; what is in `wrong` came with one element changed, as (rank, slice)."""
    arrivals = Arrivals(tensor_digests(TENSORS), layout)
    for rank, held in layout.items():
        for piece, _ in held:
            for part in slices.chunks(piece, 4):
                data = content(part).clone()
                if (rank, piece) in wrong and part.start == piece.start:
                    data.view(-1)[0] += 1
                if (rank, piece) not in left_out:
                    arrivals.add(rank, part, data)
    return arrivals.first_wrong(), arrivals.unchecked()


def layout_of(*ranks):
    return {rank: [(piece, "float32") for piece in held] for rank, held in enumerate(ranks)}


def test_slices_of_several_ranks_add_up():
    assert check(LAYOUT) == (None, [])


def test_the_first_wrong_tensor_is_named():
    assert check(LAYOUT, wrong=[(0, HALVES[2])])[0] == "b"
    assert check(LAYOUT, wrong=[(0, HALVES[2]), (1, HALVES[1])])[0] == "a"


def test_each_ranks_copy_counts(subtests):
    for rank, piece in itertools.product([0, 1], [slices.whole("a", (6, 4)), HALVES[0]]):
        with subtests.test(rank=rank, piece=piece):
            layout = layout_of([piece], [piece], [HALVES[1]])
            assert check(layout) == (None, [] if piece == HALVES[0] else ["a"])
            assert check(layout, wrong=[(rank, piece)])[0] == "a"


def test_copies_that_are_wrong_in_the_same_way_are_wrong():
    layout = layout_of([HALVES[0]], [HALVES[0]], [HALVES[1]])
    assert check(layout, wrong=[(0, HALVES[0]), (1, HALVES[0])])[0] == "a"


ROWS = [TensorSlice(name="a", start=(row, 0), shape=(3, 4)) for row in (0, 3)]


def test_a_tensor_that_ranks_hold_cut_differently_is_checked_in_each_way(subtests):
    for wrong in [(0, ROWS[0]), (1, ROWS[1]), (2, HALVES[0]), (3, HALVES[1])]:
        with subtests.test(wrong=wrong):
            layout = layout_of([ROWS[0]], [ROWS[1]], [HALVES[0]], [HALVES[1]])
            assert check(layout) == (None, [])
            assert check(layout, wrong=[wrong]) == ("a", [])


def test_what_no_other_rank_completes_is_told_to_be_unchecked():
    layout = layout_of([ROWS[0]], [TensorSlice(name="a", start=(2, 0), shape=(4, 4))], [HALVES[2]])
    corrupted = [(0, ROWS[0]), (1, layout[1][0][0])]
    assert check(layout, wrong=corrupted) == (None, ["a"])
    layout = layout_of([ROWS[0]], [ROWS[0]])
    layout[0].append((TensorSlice(name="a", start=(4, 0), shape=(2, 4)), "float32"))
    layout[1].append((TensorSlice(name="a", start=(4, 0), shape=(2, 4)), "float32"))
    assert check(layout) == (None, ["a"])
    assert check(layout, wrong=[(1, ROWS[0])])[0] == "a"  # its copies differ
    layout = layout_of([slices.whole("a", (6, 4)), HALVES[2]], [ROWS[0]])
    assert check(layout, wrong=[(1, ROWS[0])]) == (None, ["a"])
    assert check(layout, wrong=[(0, slices.whole("a", (6, 4)))])[0] == "a"


def test_of_what_did_not_arrive_whole_nothing_is_said():
    assert check(LAYOUT, wrong=[(1, HALVES[1])], left_out=[(0, HALVES[0])]) == (None, ["a"])


def test_what_a_rank_names_twice_is_counted_once():
    layout = layout_of([slices.whole("a", (6, 4)), ROWS[0], HALVES[2], HALVES[2]])
    arrivals = Arrivals(tensor_digests(TENSORS), layout)
    for piece in (slices.whole("a", (6, 4)), HALVES[2]):
        arrivals.add(0, piece, content(piece))
    assert (arrivals.first_wrong(), arrivals.unchecked()) == (None, [])
