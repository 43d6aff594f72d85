import functools
import itertools
import math

import attrs
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cosmos_core.errors import WeightSyncError
from cosmos_core.protocols import TensorSlice
from cosmos_core.weights import partition, slices
from cosmos_core.weights.planner import Member, Plan
from cosmos_core.weights.shards import ShardMap, TensorFacts
from cosmos_core.weights.topology import Place

NEAREST_FIRST = ("process", "host", "rack")


def box(name, start, shape):
    return TensorSlice(name=name, start=tuple(start), shape=tuple(shape))


def index(piece):
    return tuple(slice(s, s + n) for s, n in zip(piece.start, piece.shape, strict=True))


def shard_map(ranks, **tensors):
    facts = {name: TensorFacts(shape=shape, dtype=dtype) for name, (shape, dtype) in tensors.items()}
    return ShardMap(tensors=facts, ranks=ranks)


def whole(**tensors):
    return shard_map({0: tuple(slices.whole(name, shape) for name, (shape, _) in tensors.items())}, **tensors)


def plan_of(sources, targets, places=(), **options):
    members = [Member.at(place, each) for place, each in itertools.zip_longest(places, sources, fillvalue=Place())]
    return Plan(members, [Member(shards=each) for each in targets], **options)


# -- a pool: a small transformer with experts, split as replicas split it ----------------------------------------------


@attrs.frozen
class Tensor:
    shape: tuple[int, ...]
    layer: int
    expert: int | None = None
    tp_dim: int | None = None
    dtype: str = "bfloat16"


@attrs.frozen
class Mesh:
    """A replica's axes; `copies` stands for cp: processes that hold the same."""

    pp: int = 1
    tp: int = 1
    fsdp: int = 1
    ep: int = 1
    copies: int = 1


@st.composite
def models(draw):
    hidden, wide = draw(st.integers(5, 24)), draw(st.integers(5, 40))
    tensors = {"embed": Tensor((draw(st.integers(7, 60)), hidden), layer=0, tp_dim=0)}
    num_layers, num_experts = draw(st.integers(1, 4)), draw(st.integers(0, 5))
    for layer in range(num_layers):
        tensors[f"{layer}.norm"] = Tensor((hidden,), layer, dtype="float32")
        tensors[f"{layer}.up"] = Tensor((wide, hidden), layer, tp_dim=0)
        tensors[f"{layer}.down"] = Tensor((hidden, wide), layer, tp_dim=1)
        tensors[f"{layer}.scale"] = Tensor((), layer, dtype="float32")
        if draw(st.booleans()):
            tensors[f"{layer}.stacked"] = Tensor((3, wide, 4), layer, tp_dim=1)
        for expert in range(num_experts):
            tensors[f"{layer}.experts.{expert}"] = Tensor((hidden, 6), layer, expert=expert)
    tensors["head"] = Tensor((draw(st.integers(7, 60)), hidden), num_layers - 1, tp_dim=0)
    return tensors


def part(total, number, rank, is_even):
    """As `torch.chunk` splits: the last may be short, or empty; else within one of equal."""
    if is_even:
        first, end = (total * each // number for each in (rank, rank + 1))
    else:
        step = -(-total // number)
        first, end = min(rank * step, total), min((rank + 1) * step, total)
    return first, end - first


def split(tensors, mesh, is_even):
    """What each rank of a replica holds."""
    num_layers = 1 + max(tensor.layer for tensor in tensors.values())
    num_experts = 1 + max((t.expert for t in tensors.values() if t.expert is not None), default=0)
    ranks = {}
    axes = (range(n) for n in (mesh.pp, mesh.copies, mesh.fsdp, mesh.ep, mesh.tp))
    for rank, (pp, _, fsdp, ep, tp) in enumerate(itertools.product(*axes)):
        held = []
        first_layer, layers = part(num_layers, mesh.pp, pp, is_even)
        first_expert, experts = part(num_experts, mesh.ep, ep, is_even)
        for name, tensor in tensors.items():
            if not first_layer <= tensor.layer < first_layer + layers:
                continue
            if tensor.expert is not None and not first_expert <= tensor.expert < first_expert + experts:
                continue
            start, shape = [0] * len(tensor.shape), list(tensor.shape)
            if tensor.tp_dim is not None:
                start[tensor.tp_dim], shape[tensor.tp_dim] = part(shape[tensor.tp_dim], mesh.tp, tp, is_even)
            if shape:
                first, shape[0] = part(shape[0], mesh.fsdp, fsdp, is_even)
                start[0] += first
            held.append(box(name, start, shape))
        ranks[rank] = tuple(held)
    facts = {name: TensorFacts(shape=tensor.shape, dtype=tensor.dtype) for name, tensor in tensors.items()}
    return ShardMap(tensors=facts, ranks=ranks)


@st.composite
def places(draw):
    rack, host = draw(st.sampled_from(["", "r", "s"])), draw(st.sampled_from(["", "a", "b"]))
    process = draw(st.sampled_from(["", "1", "2"]))
    host = host and rack + host
    return Place(rack=rack, host=host, process=process and host + process)


@st.composite
def members(draw, tensors, meshes, most):
    """Replicas that split the model alike, as all of a run do, or not."""
    found = []
    mesh, is_even = draw(meshes), draw(st.booleans())
    for _ in range(draw(st.integers(1, most))):
        if draw(st.integers(0, 4)) == 0:
            mesh, is_even = draw(meshes), draw(st.booleans())
        shards = split(tensors, mesh, is_even)
        found.append(Member(shards=shards, places={rank: draw(places()) for rank in shards.ranks}))
    return found


def sizes(most):
    return st.sampled_from([1, 1, *range(2, most + 1)])


POLICIES = st.builds(Mesh, pp=sizes(2), tp=sizes(3), fsdp=sizes(3), ep=sizes(2), copies=sizes(2)).filter(
    lambda mesh: math.prod(attrs.astuple(mesh)) <= 4
)
ROLLOUTS = st.builds(Mesh, pp=sizes(2), tp=sizes(3), ep=sizes(2)).filter(
    lambda mesh: math.prod(attrs.astuple(mesh)) <= 4
)


@st.composite
def pools(draw):
    tensors = draw(models())
    return tensors, draw(members(tensors, POLICIES, 2)), draw(members(tensors, ROLLOUTS, 3))


def distance(one, other):
    for far, label in enumerate(NEAREST_FIRST):
        if getattr(one, label) and getattr(one, label) == getattr(other, label):
            return far
    return len(NEAREST_FIRST)


class Reference:
    """Who holds and who wants each element, by marking every single one."""

    def __init__(self, tensors, sources, targets):
        self.held = [self._masks(tensors, each.shards.ranks[rank]) for each in sources for rank in each.shards.ranks]
        self.wanted = [self._masks(tensors, each.shards.ranks[rank]) for each in targets for rank in each.shards.ranks]
        self.source_places = [each.places[rank] for each in sources for rank in each.shards.ranks]
        self.target_places = [each.places[rank] for each in targets for rank in each.shards.ranks]
        self.nearest = functools.cache(self._nearest)
        self.itemsize = {name: 4 if tensor.dtype == "float32" else 2 for name, tensor in tensors.items()}

    @staticmethod
    def _masks(tensors, held):
        masks = {name: np.zeros(tensor.shape, bool) for name, tensor in tensors.items()}
        for piece in held:
            masks[piece.name][index(piece)] = True
        return masks

    def _nearest(self, target, name):
        """Bit s of each element: source s is among the nearest that hold it."""
        place = self.target_places[target]
        far = [distance(source, place) for source in self.source_places]
        best = np.full(self.wanted[target][name].shape, 99)
        for source, masks in enumerate(self.held):
            best = np.where(masks[name], np.minimum(best, far[source]), best)
        bits = np.zeros(best.shape, np.int64)
        for source, masks in enumerate(self.held):
            bits |= np.where(masks[name] & (best == far[source]), 1 << source, 0)
        return bits

    def demands(self):
        """Bytes that each set of sources could equally well send."""
        found = {}
        for target, masks in enumerate(self.wanted):
            for name, mask in masks.items():
                for bits, count in zip(*np.unique(self.nearest(target, name)[mask], return_counts=True), strict=True):
                    found[int(bits)] = found.get(int(bits), 0) + int(count) * self.itemsize[name]
        return found


def least_possible(demands, num_sources):
    """The largest load of the most even plan: some set of sources has to send what nobody else can."""
    return max(
        sum(amount for bits, amount in demands.items() if not bits & ~chosen) / chosen.bit_count()
        for chosen in range(1, 1 << num_sources)
    )


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(pools())
def test_every_element_is_sent_once_by_the_nearest_and_loads_are_even(pool):
    tensors, sources, targets = pool
    plan = Plan(sources, targets, grain_bytes=1)
    reference = Reference(tensors, sources, targets)
    loads = np.zeros(len(plan.sources), int)
    num_parts = np.zeros(len(plan.sources), int)
    for target, wanted in enumerate(reference.wanted):
        sent = {name: np.zeros(mask.shape, int) for name, mask in wanted.items()}
        nearest = {name: reference.nearest(target, name) for name in wanted}
        for source, pieces in plan.slices(target).items():
            for piece in pieces:
                sent[piece.name][index(piece)] += 1
                assert ((nearest[piece.name][index(piece)] >> source) & 1).all()
                loads[source] += slices.size(piece) * reference.itemsize[piece.name]
            num_parts[source] += len({int(nearest[piece.name][index(piece)].flat[0]) for piece in pieces})
        for name, mask in wanted.items():
            assert (sent[name] == mask).all()
    assert (plan.loads() == loads).all()
    demands = reference.demands()
    assert loads.sum() == sum(demands.values())
    # Each part that a source gives ends within half an element of where it should, at both ends.
    slack = 4 * num_parts.max()
    assert loads.max() <= least_possible(demands, len(loads)) + 0.1 * loads.mean() + slack


@settings(max_examples=15)
@given(pools(), st.randoms(use_true_random=False))
def test_whoever_plans_comes_to_the_same(pool, random):
    _, sources, targets = pool
    plan = Plan(sources, targets)
    again = Plan(sources, [attrs.evolve(each, shards=attrs.evolve(each.shards)) for each in targets])
    order = list(range(len(targets)))
    random.shuffle(order)
    other = Plan(sources, [targets[number] for number in order])
    for number, (member, rank) in enumerate(plan.targets):
        assert plan.slices(number) == again.slices(number)
        there = other.targets.index((order.index(member), rank))
        assert sorted(plan.slices(number)) == sorted(other.slices(there))
        for source, pieces in plan.slices(number).items():
            assert set(pieces) == set(other.slices(there)[source])


def test_equally_near_sources_share_the_load():
    facts = {"embedding": ((1000, 64), "bfloat16"), "w": ((100, 64), "bfloat16")}
    loads = plan_of([whole(**facts)] * 3, [whole(**facts)], grain_bytes=4096).loads()
    assert loads.sum() == 1100 * 64 * 2
    assert max(loads) - min(loads) <= 4096


def test_who_must_send_more_of_one_tensor_sends_less_of_another():
    a, b = ((60, 8), "float32"), ((100, 8), "float32")
    alone = shard_map({0: (box("a", (0, 0), (60, 8)), box("b", (0, 0), (100, 8)))}, a=a, b=b)
    loads = plan_of([alone, whole(b=b)], [whole(a=a, b=b)], grain_bytes=1).loads()
    assert loads.tolist() == [80 * 32, 80 * 32]


def test_a_row_larger_than_a_grain_is_divided():
    stacked = {"experts": ((2, 3, 1000), "float32")}
    loads = plan_of([whole(**stacked)] * 5, [whole(**stacked)], grain_bytes=4).loads()
    assert loads.tolist() == [4800] * 5


def test_rows_of_one_sender_go_as_few_slices(subtests):
    for shape, num_sources in itertools.product([(8192, 28672), (4, 300, 40000)], [2, 3]):
        with subtests.test(shape=shape, num_sources=num_sources):
            wide = {"w": (shape, "bfloat16")}
            plan = plan_of([whole(**wide)] * num_sources, [whole(**wide)])
            pieces = [piece for pieces in plan.slices(0).values() for piece in pieces]
            # At each border: the part of a row, in each dim, before and behind it.
            assert len(pieces) <= num_sources + 2 * (num_sources - 1) * (len(shape) - 1)
            assert sum(slices.size(piece) for piece in pieces) == math.prod(shape)
            assert np.ptp(plan.loads()) <= 64 << 10


def test_who_alone_is_near_gives_a_tensor_in_one_slice():
    wide = {"w": ((512, 28672), "bfloat16")}
    sources = [Member.at(Place(host=host), whole(**wide)) for host in "xy"]
    plan = Plan(sources, [Member.at(Place(host="y"), whole(**wide))])
    assert plan.slices(0) == {1: [slices.whole("w", wide["w"][0])]}


def test_a_slice_never_reaches_across_what_a_source_holds_in_two():
    parts = (box("w", (0, 0), (40, 28672)), box("w", (40, 0), (24, 28672)))
    source = shard_map({0: parts}, w=((64, 28672), "bfloat16"))
    plan = plan_of([source, source], [whole(w=((64, 28672), "bfloat16"))])
    for pieces in plan.slices(0).values():
        assert all(any(slices.contains(part, piece) for part in parts) for piece in pieces)
    assert sum(map(len, plan.slices(0).values())) <= 6


def test_a_source_on_the_same_host_gives_everything_it_has():
    facts = {"w": ((100, 64), "float32")}
    sources = [Member.at(Place(host=host), whole(**facts)) for host in ("x", "y", "x")]
    plan = Plan(sources, [Member.at(Place(host="y"), whole(**facts))])
    assert set(plan.slices(0)) == {1}


def test_equal_ranks_and_equally_split_tensors_are_planned_once(monkeypatch):
    tensors = {f"{layer}.experts.{expert}": Tensor((8, 6), layer, expert) for layer in range(4) for expert in range(6)}
    calls = []
    original = partition.chunks
    monkeypatch.setattr(partition, "chunks", lambda *arguments: calls.append(1) or original(*arguments))
    policy = split(tensors, Mesh(pp=2, ep=3), is_even=True)
    numbers = []
    for replicas in (1, 8):
        calls.clear()
        plan = plan_of([policy] * 2, [split(tensors, Mesh(ep=2), is_even=True) for _ in range(replicas)])
        numbers.append(len(calls))
        assert plan.loads().sum() == replicas * sum(96 for _ in tensors)
    # A pattern for each stage and each pair of ranks that share experts: 2 x (3 + 2 - 1).
    assert numbers == [8, 8]


def test_what_a_rank_names_twice_is_sent_once():
    facts = {"w": ((10, 6), "float32")}
    target = shard_map({0: (box("w", (0, 0), (6, 6)), box("w", (4, 0), (6, 6)), box("w", (0, 0), (6, 6)))}, **facts)
    assert plan_of([whole(**facts)], [target]).loads().tolist() == [240]


def test_what_nobody_holds_is_refused():
    half = shard_map({0: (box("w", (0, 0), (4, 2)), box("x", (0, 0), (4, 2)))}, w=((4, 4), "float32"))
    with pytest.raises(WeightSyncError, match=r"^w: no policy replica holds the slice \(4, 2\) at \(0, 2\)"):
        plan_of([half], [whole(w=((4, 4), "float32"))])
    with pytest.raises(WeightSyncError, match=r"^v: the engine wants it, and no policy replica publishes it"):
        plan_of([half], [whole(w=((4, 2), "float32"), v=((1,), "float32"))])


def test_the_first_hole_is_named():
    facts = dict.fromkeys("abcd", ((4, 4), "float32"))
    held = {"a": 4, "b": 4, "c": 3, "d": 1}
    source = shard_map({0: tuple(box(name, (0, 0), (4, held[name])) for name in "dcba")}, **facts)
    with pytest.raises(WeightSyncError, match=r"^c: no policy replica holds the slice \(4, 1\) at \(0, 3\)"):
        plan_of([source], [whole(**{name: facts[name] for name in "dacb"})])


def test_the_first_tensor_that_differs_is_named(subtests):
    for other in [((4, 5), "float32"), ((4, 4), "bfloat16")]:
        with subtests.test(other=other):
            sources = [whole(a=((2,), "float32"), b=((4, 4), "float32"), c=((4, 4), "float32"))]
            with pytest.raises(WeightSyncError, match=r"^b: published as float32 \(4, 4\), the engine holds"):
                plan_of(sources, [whole(a=((2,), "float32"), c=other, b=other)])


def test_replicas_of_different_models_are_refused():
    source, one, other = whole(w=((4, 4), "float32")), whole(w=((4, 4), "float32")), whole(w=((4, 5), "float32"))
    for sources, targets in (([source], [one, other]), ([source, other], [other]), ([other, source], [other])):
        with pytest.raises(WeightSyncError, match=r"^w: published as float32 \(4, 4\), .* holds float32 \(4, 5\)"):
            plan_of(sources, targets)


def test_empty_tensors_need_no_transfer():
    empty = whole(w=((0, 4), "float32"))
    plan = plan_of([empty], [empty])
    assert plan.slices(0) == {}
    assert plan.loads().tolist() == [0]
    assert plan_of([], []).loads().tolist() == []
