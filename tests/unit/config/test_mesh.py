import pytest

from cosmos_core.config.mesh import check_sizes, choices, data_ranks, divisors, expert_shards, mesh_problems, world_size
from cosmos_core.config.schema import MeshConfig
from cosmos_core.errors import ConfigError


def test_sizes_by_hand():
    sizes = MeshConfig(pp=2, dp_replicate=3, dp_shard=4, cp=2, tp=2, ep=8)
    assert world_size(sizes) == 96
    assert data_ranks(sizes) == 12
    assert expert_shards(sizes) == 2
    assert list(mesh_problems(sizes)) == []
    check_sizes(sizes, 96)


def test_divisors_are_complete_and_ascend():
    for number in range(1, 200):
        assert divisors(number) == [each for each in range(1, number + 1) if number % each == 0]


def test_choices_read_as_a_sentence():
    assert [choices([1]), choices([1, 2]), choices([1, 2, 4])] == ["1", "1 or 2", "1, 2 or 4"]


def test_what_a_refusal_offers_is_accepted_and_nothing_else(subtests):
    for shared in [1, 2, 6, 8]:
        for tp in [1, 2, 3, 4]:
            with subtests.test(shared=shared, tp=tp):
                accepted = [
                    ep for ep in range(1, 64) if not list(mesh_problems(MeshConfig(dp_shard=shared, tp=tp, ep=ep)))
                ]
                for problem in mesh_problems(MeshConfig(dp_shard=shared, tp=tp, ep=63)):
                    assert problem.endswith(f"ep can be {choices(accepted)}")


def test_another_number_of_processes_is_refused():
    with pytest.raises(ConfigError, match=r"= 4 processes, and the replica has 6; .*product is 6"):
        check_sizes(MeshConfig(tp=2, dp_shard=2), 6)
