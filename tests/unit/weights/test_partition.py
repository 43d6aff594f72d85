import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cosmos_core.weights.partition import chunks

SHAPE = (5, 4, 3)


@st.composite
def shards(draw):
    first = [draw(st.integers(0, total - 1)) for total in SHAPE]
    return first, [draw(st.integers(low + 1, total)) for low, total in zip(first, SHAPE, strict=True)]


def mask(first, end):
    found = np.zeros(SHAPE, bool)
    found[tuple(slice(low, high) for low, high in zip(first, end, strict=True))] = True
    return found


@given(
    st.lists(st.tuples(shards(), st.integers(0, 3)), min_size=1, max_size=6), st.lists(shards(), min_size=1, max_size=3)
)
def test_cells_have_the_holders_that_masks_say(held, wanted):
    first_SD, end_SD = (np.array([shard[side] for shard, _ in held]) for side in (0, 1))
    first_TD, end_TD = (np.array([shard[side] for shard in wanted]) for side in (0, 1))
    cut = chunks(np.array([kind for _, kind in held]), first_SD, end_SD, first_TD, end_TD)
    counts = np.zeros((len(wanted), *SHAPE), int)
    for index in range(len(cut.wanted_C)):
        chunk = mask(cut.first_CD[index], cut.end_CD[index])
        counts[cut.wanted_C[index]] += chunk
        for kind in range(4):
            has = np.zeros(SHAPE, bool)
            for shard, owner in held:
                has |= mask(*shard) & (owner == kind)
            expected = kind in cut.holders[cut.holders_C[index]]
            assert (has[chunk] == expected).all()
    somebody = np.zeros(SHAPE, bool)
    for shard, _ in held:
        somebody |= mask(*shard)
    for index, shard in enumerate(wanted):
        assert (counts[index] == (mask(*shard) & somebody)).all()
    assert cut.is_covered == all((somebody | ~mask(*shard)).all() for shard in wanted)
