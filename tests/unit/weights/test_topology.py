import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosmos_core.errors import WeightSyncError
from cosmos_core.protocols import TensorSlice
from cosmos_core.weights.planner import Member, Plan
from cosmos_core.weights.shards import ShardMap, TensorFacts
from cosmos_core.weights.topology import ORIGIN, Place, distances, least_depth, parents

PLACES = st.builds(
    lambda rack, host: Place(rack=rack, host=host and rack + host),
    st.sampled_from(["", "r", "s"]),
    st.sampled_from(["", "a", "b", "c"]),
)


def depth_of(found, replica):
    depth = 1
    while found[replica] != ORIGIN:
        replica, depth = found[replica], depth + 1
        assert depth <= len(found), "a cycle"
    return depth


@given(st.lists(PLACES, max_size=40), PLACES, st.integers(1, 6))
def test_everybody_is_reached_with_bounded_readers_and_depth(replicas, origin, fan_out):
    found = parents(replicas, origin, fan_out)
    assert found == parents(replicas, origin, fan_out)
    assert len(found) == len(replicas)
    for source in (ORIGIN, *range(len(replicas))):
        assert found.count(source) <= fan_out
    depths = [depth_of(found, replica) for replica in range(len(replicas))]
    assert max(depths, default=0) == least_depth(len(replicas), fan_out)


def test_depths_by_hand():
    assert [least_depth(number, 3) for number in (0, 1, 3, 4, 12, 13, 39, 40)] == [0, 1, 1, 2, 2, 3, 3, 4]
    assert least_depth(5, 1) == 5


def test_one_replica_of_each_host_reads_from_afar():
    replicas = [Place(rack=f"r{number % 2}", host=f"h{number % 4}") for number in range(16)]
    found = parents(replicas, Place(rack="r0", host="policy"), 4)
    assert found[:4] == [ORIGIN] * 4
    assert [found[number] for number in range(4, 16)] == [number % 4 for number in range(4, 16)]


def test_a_host_reads_from_its_rack_when_the_origin_is_full():
    replicas = [Place(rack=f"r{number // 3}", host=f"h{number}") for number in range(6)]
    found = parents(replicas, Place(rack="elsewhere", host="policy"), 2)
    assert [number for number in range(6) if found[number] == ORIGIN] == [0, 3]
    assert found == [ORIGIN, 0, 0, ORIGIN, 3, 3]


def test_a_chain_when_each_may_serve_one():
    assert parents([Place()] * 4, Place(), 1) == [ORIGIN, 0, 1, 2]


def test_no_reader_at_all_is_refused():
    with pytest.raises(WeightSyncError, match="a fan-out of 0"):
        parents([Place()], Place(), 0)


def test_what_a_replica_got_is_enough_for_its_readers():
    tensors = {"w": TensorFacts(shape=(12, 5), dtype="float32")}

    def rows(number):
        pieces = [(TensorSlice(name="w", start=(12 * r // number, 0), shape=(12 // number, 5)),) for r in range(number)]
        return ShardMap(tensors=tensors, ranks=dict(enumerate(pieces)))

    replicas = [Member(shards=rows(number)) for number in (2, 3, 4, 1, 2)]
    found = parents([Place()] * len(replicas), Place(), 2)
    policy = Member(shards=rows(6))
    for replica, parent in zip(replicas, found, strict=True):
        plan = Plan([policy if parent == ORIGIN else replicas[parent]], [replica])
        assert plan.loads().sum() == 12 * 5 * 4


def test_the_nearest_thing_in_common_counts():
    here = Place(process="p", host="h", rack="r")
    sources = [
        here,
        Place(process="q", host="h", rack="r"),
        Place(process="q", host="i", rack="r"),
        Place(process="q", host="i", rack="s"),
        Place(host="h"),
    ]
    assert distances(sources, [here]).tolist() == [[0], [1], [2], [3], [1]]


def test_what_is_not_known_is_nowhere_near():
    assert distances([Place()], [Place(), Place(rack="r")]).tolist() == [[3, 3]]
