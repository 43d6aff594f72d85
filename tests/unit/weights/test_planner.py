import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosmos_core.errors import WeightSyncError
from cosmos_core.protocols import TensorSlice
from cosmos_core.weights import slices
from cosmos_core.weights.planner import plan
from cosmos_core.weights.shards import ShardMap, TensorFacts


def box(name, start, shape):
    return TensorSlice(name=name, start=tuple(start), shape=tuple(shape))


def index(piece):
    return tuple(slice(s, s + n) for s, n in zip(piece.start, piece.shape, strict=True))


def shard_map(ranks, **tensors):
    facts = {name: TensorFacts(shape=shape, dtype=dtype) for name, (shape, dtype) in tensors.items()}
    return ShardMap(tensors=facts, ranks=ranks)


def whole(**tensors):
    return shard_map({0: tuple(slices.whole(name, shape) for name, (shape, _) in tensors.items())}, **tensors)


@st.composite
def partitions(draw, name, shape):
    """Disjoint slices that cover a tensor."""
    stack, parts = [slices.whole(name, shape)], []
    while stack:
        piece = stack.pop()
        dim = draw(st.integers(-1, len(shape) - 1))
        if dim < 0 or piece.shape[dim] < 2:
            parts.append(piece)
            continue
        cut = draw(st.integers(1, piece.shape[dim] - 1))
        for first, count in ((0, cut), (cut, piece.shape[dim] - cut)):
            start, size = list(piece.start), list(piece.shape)
            start[dim], size[dim] = piece.start[dim] + first, count
            stack.append(box(name, start, size))
    return parts


@given(data=st.data())
def test_every_wanted_element_is_sent_exactly_once_by_one_who_has_it(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    facts = {"w": (shape, "float32")}
    num_sources = data.draw(st.integers(1, 4))
    held = [[] for _ in range(num_sources)]
    for part in data.draw(partitions("w", shape)):
        for source in data.draw(st.sets(st.integers(0, num_sources - 1), min_size=1)):
            held[source].append(part)
    sources = [shard_map({0: tuple(parts)}, **(facts if parts else {})) for parts in held]
    parts = data.draw(partitions("w", shape))
    owners = {rank: [] for rank in range(3)}
    for part in parts:
        for rank in data.draw(st.sets(st.integers(0, 2), min_size=1)):
            owners[rank].append(part)
    target = shard_map({rank: tuple(wanted) for rank, wanted in owners.items()}, **facts)
    hosts = data.draw(st.lists(st.sampled_from("ab"), min_size=num_sources, max_size=num_sources))

    result = plan(sources, target, hosts=hosts, host="a", chunk_bytes=data.draw(st.integers(1, 64)))

    counts = {rank: np.zeros(shape, int) for rank in owners}
    for source, by_rank in result.items():
        for rank, pieces in by_rank.items():
            for piece in pieces:
                counts[rank][index(piece)] += 1
                assert any(slices.contains(part, piece) for part in held[source])
    for rank, wanted in owners.items():
        expected = np.zeros(shape, int)
        for part in wanted:
            expected[index(part)] += 1
        assert (counts[rank] == expected).all()
    sent_far = [piece for s, by_rank in result.items() if hosts[s] != "a" for ps in by_rank.values() for piece in ps]
    near = [part for s, parts in enumerate(held) if hosts[s] == "a" for part in parts]
    assert not any(slices.overlap(piece, part) for piece in sent_far for part in near)


def test_equally_near_sources_share_the_load():
    facts = {"embedding": ((1000, 64), "bfloat16"), "w": ((100, 64), "bfloat16")}
    result = plan([whole(**facts)] * 3, whole(**facts), chunk_bytes=4096)
    loads = [sum(slices.size(piece) * 2 for piece in result[source][0]) for source in range(3)]
    assert sum(loads) == 1100 * 64 * 2
    assert max(loads) - min(loads) <= 4096


def test_a_source_on_the_same_host_gives_everything_it_has():
    facts = {"w": ((100, 64), "float32")}
    result = plan([whole(**facts)] * 3, whole(**facts), hosts=["x", "y", "x"], host="y")
    assert set(result) == {1}


def test_what_nobody_holds_is_refused():
    half = shard_map({0: (box("w", (0, 0), (4, 2)),)}, w=((4, 4), "float32"))
    with pytest.raises(WeightSyncError, match=r"w: no policy replica holds the slice \(4, 2\) at \(0, 2\)"):
        plan([half], whole(w=((4, 4), "float32")))
    with pytest.raises(WeightSyncError, match="v: the engine wants it, and no policy replica publishes it"):
        plan([half], whole(w=((4, 2), "float32"), v=((1,), "float32")))


@pytest.mark.parametrize("other", [((4, 5), "float32"), ((4, 4), "bfloat16")])
def test_the_first_tensor_that_differs_is_named(other):
    sources = [whole(a=((2,), "float32"), b=((4, 4), "float32"), c=((4, 4), "float32"))]
    with pytest.raises(WeightSyncError, match=r"^b: published as float32 \(4, 4\), the engine holds"):
        plan(sources, whole(a=((2,), "float32"), c=other, b=other))


def test_empty_tensors_need_no_transfer():
    assert plan([whole(w=((0, 4), "float32"))], whole(w=((0, 4), "float32"))) == {}
