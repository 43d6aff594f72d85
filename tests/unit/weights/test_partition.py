import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cosmos_core.weights.partition import cells

SHAPE = (5, 4, 3)


@st.composite
def boxes(draw):
    first = [draw(st.integers(0, total - 1)) for total in SHAPE]
    return first, [draw(st.integers(low + 1, total)) for low, total in zip(first, SHAPE, strict=True)]


def mask(first, end):
    found = np.zeros(SHAPE, bool)
    found[tuple(slice(low, high) for low, high in zip(first, end, strict=True))] = True
    return found


@given(
    st.lists(st.tuples(boxes(), st.integers(0, 3)), min_size=1, max_size=6), st.lists(boxes(), min_size=1, max_size=3)
)
def test_cells_have_the_holders_that_masks_say(held, wanted):
    first_SD, end_SD = (np.array([box[side] for box, _ in held]) for side in (0, 1))
    first_TD, end_TD = (np.array([box[side] for box in wanted]) for side in (0, 1))
    cut = cells(np.array([kind for _, kind in held]), first_SD, end_SD, first_TD, end_TD)
    counts = np.zeros((len(wanted), *SHAPE), int)
    for index in range(len(cut.wanted_C)):
        cell = mask(cut.first_CD[index], cut.end_CD[index])
        counts[cut.wanted_C[index]] += cell
        for kind in range(4):
            has = np.zeros(SHAPE, bool)
            for box, owner in held:
                has |= mask(*box) & (owner == kind)
            expected = kind in cut.holders[cut.holders_C[index]]
            assert (has[cell] == expected).all()
    somebody = np.zeros(SHAPE, bool)
    for box, _ in held:
        somebody |= mask(*box)
    for index, box in enumerate(wanted):
        assert (counts[index] == (mask(*box) & somebody)).all()
    assert cut.is_covered == all((somebody | ~mask(*box)).all() for box in wanted)
