from __future__ import annotations

import pytest
import torch

from cosmos_core.errors import AttestationError
from cosmos_core.protocols import TensorSlice
from cosmos_core.weights import slices
from cosmos_core.weights.digest import digest_of, tensor_digest
from cosmos_engine_vllm.ranks import RankShards

TENSORS = {
    "w": torch.arange(24.0).view(4, 6),
    "n": torch.tensor([1.0, 2.0]),
    "s": torch.tensor(3.0),
    "e": torch.empty(0, 2),
}


def shard(name, start, shape):
    return TensorSlice(name=name, start=start, shape=shape)


# Parts that overlap in part, one that all have, one that one has, and a rank that has nothing of a tensor.
HELD = {
    0: {"w": [shard("w", (0, 0), (3, 4))], "n": [shard("n", (0,), (2,))], "s": [shard("s", (), ())]},
    1: {"w": [shard("w", (2, 2), (2, 4)), shard("w", (0, 4), (2, 2))], "n": [shard("n", (0,), (2,))]},
    2: {"w": [shard("w", (3, 0), (1, 2)), shard("w", (0, 0), (0, 6))], "n": [shard("n", (0,), (2,))]},
}


@pytest.fixture
def rank_shards():
    return RankShards(TENSORS, HELD)


def digests(rank_shards, tensors=TENSORS):
    """What each rank reads back of its rank_shards, if these are the whole tensors."""
    return {
        rank: {
            name: [
                tensor_digest(
                    name,
                    tensors[name][slices.within(part, slices.whole(name, tuple(tensors[name].shape)))],
                    start=part.start,
                    shape=tuple(tensors[name].shape),
                )
                for part in each
            ]
            for name, each in rank_shards.of(rank).items()
        }
        for rank in HELD
    }


def test_each_element_is_in_one_part_which_its_holders_hold_whole(rank_shards):
    assert {name: rank_shards.num_held(name) for name in TENSORS} == {"w": 24, "n": 2, "s": 1, "e": 0}
    for rank, held in HELD.items():
        for name, shards in held.items():
            mine = rank_shards.of(rank)[name]
            assert sum(map(slices.size, mine)) == sum(map(slices.size, shards))
            assert all(any(slices.contains(each, part) for each in shards) for part in mine)


def test_the_digest_of_all_ranks_is_that_of_the_whole_tensors(rank_shards):
    assert rank_shards.combine(digests(rank_shards), "the engine") == digest_of(TENSORS)
    other = {**TENSORS, "w": TENSORS["w"] + 1}
    assert rank_shards.combine(digests(rank_shards, other), "the engine") == digest_of(other) != digest_of(TENSORS)


def test_what_no_rank_holds_is_not_counted():
    rank_shards = RankShards(TENSORS, {0: {"w": [shard("w", (0, 0), (3, 6))]}})
    assert (rank_shards.num_held("w"), rank_shards.num_held("n")) == (18, 0)


def test_ranks_that_hold_the_same_part_must_hold_the_same_values(rank_shards):
    for name, place, where in [("n", 0, r"\(2,\) at \(0,\)"), ("w", 0, r"\(1, 2\) at \(2, 2\)")]:
        found = digests(rank_shards)
        found[1][name][place] += 1
        with pytest.raises(
            AttestationError, match=rf"{name}: ranks 0 and 1 of the engine hold other values .* {where}"
        ):
            rank_shards.combine(found, "the engine")
