import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cosmos_core.protocols import TensorSlice
from cosmos_core.weights import slices

SHAPE = (5, 4, 6)


@st.composite
def boxes(draw):
    start = tuple(draw(st.integers(0, n - 1)) for n in SHAPE)
    shape = tuple(draw(st.integers(1, n - s)) for n, s in zip(SHAPE, start, strict=True))
    return TensorSlice(name="w", start=start, shape=shape)


def mask(*pieces):
    counts = np.zeros(SHAPE, int)
    for piece in pieces:
        counts[tuple(slice(s, s + n) for s, n in zip(piece.start, piece.shape, strict=True))] += 1
    return counts


@given(boxes(), boxes())
def test_overlap_and_difference_agree_with_masks(one, other):
    common = slices.overlap(one, other)
    both = mask(one) * mask(other)
    if common is None:
        assert not both.any()
        return
    assert (mask(common) == both).all()
    assert (mask(*slices.subtract(one, common)) == mask(one) - both).all()
    assert slices.contains(one, common)
    assert slices.contains(common, one) == (one == common)


@given(boxes(), st.integers(1, 130))
def test_chunks_are_small_contiguous_and_cover(piece, limit):
    parts = slices.chunks(piece, limit)
    array = np.arange(np.prod(SHAPE)).reshape(SHAPE)[slices.within(piece, slices.whole("w", SHAPE))].copy()
    assert (mask(*parts) == mask(piece)).all()
    for part in parts:
        assert slices.size(part) <= limit
        assert array[slices.within(part, piece)].flags["C_CONTIGUOUS"]


def test_another_tensors_slice_is_not_contained():
    whole = slices.whole("w", (2, 2))
    assert not slices.contains(whole, TensorSlice(name="v", start=(0, 0), shape=(1, 1)))
    assert not slices.contains(whole, TensorSlice(name="w", start=(0,), shape=(1,)))
    assert not slices.contains(whole, TensorSlice(name="w", start=(0, -1), shape=(1, 1)))
