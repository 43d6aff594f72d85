"""Updates that are written to each rank, and the memory in which they travel."""

from pathlib import Path

import pytest
import torch

from cosmos_core.errors import AttestationError, WeightSyncError
from cosmos_core.protocols import TensorSlice
from cosmos_core.weights.digest import digest_of, tensor_digest
from cosmos_engine_vllm.shares import SharedUpdate, Shares
from cosmos_engine_vllm.staging import Place, Reading, Staging

TENSORS = {"w": torch.randn(6, 4), "norm": torch.randn(4)}
META = {name: tensor.to("meta") for name, tensor in TENSORS.items()}


def rows(first, last):
    return TensorSlice(name="w", start=(first, 0), shape=(last - first, 4))


NORM = TensorSlice(name="norm", start=(0,), shape=(4,))
RANKS = ({"w": [rows(0, 2), rows(2, 4)], "norm": [NORM]}, {"w": [rows(3, 6)], "norm": [NORM]})


@pytest.fixture
def shares():
    return Shares(META, RANKS, "Model")


def values(piece):
    return TENSORS[piece.name][tuple(slice(a, a + n) for a, n in zip(piece.start, piece.shape, strict=True))]


def digests(shares):
    return [
        {
            name: [
                tensor_digest(name, values(part), start=part.start, shape=tuple(TENSORS[name].shape)) for part in parts
            ]
            for name, parts in shares.rank_shards()[rank].items()
        }
        for rank in (0, 1)
    ]


def test_slices_that_ranks_share_count_once(shares):
    assert shares.combine(digests(shares)) == digest_of(TENSORS)


def test_a_rank_that_holds_another_copy_is_named(shares, subtests):
    for name in ["w", "norm"]:
        with subtests.test(name=name):
            found = digests(shares)
            shared = next(
                index
                for index, part in enumerate(shares.rank_shards()[1][name])
                if part in shares.rank_shards()[0][name]
            )
            found[1][name][shared] += 1
            with pytest.raises(AttestationError, match=f"{name}: ranks 0 and 1 of vLLM hold other values"):
                shares.combine(found)


def test_what_only_one_rank_holds_is_in_the_digest(shares):
    found = digests(shares)
    alone = next(
        index for index, part in enumerate(shares.rank_shards()[1]["w"]) if part not in shares.rank_shards()[0]["w"]
    )
    found[1]["w"][alone] += 1
    assert shares.combine(found) != digest_of(TENSORS)


def test_a_rank_that_has_all_of_a_tensor_lists_it_whole():
    whole = Shares(META, [{"w": [rows(0, 2), rows(2, 6)], "norm": [NORM]}], "Model")
    assert whole.layout()[0][0][0] == rows(0, 6)


def test_each_rank_is_sent_its_own(shares, subtests):
    for is_staged in [False, True]:
        with subtests.test(is_staged=is_staged):
            update, reading = SharedUpdate(1, shares, is_staged=is_staged), Reading()
            for rank, held in shares.layout().items():
                for piece, _ in held:
                    update.write_to(rank, piece, values(piece))
            update.check()
            for rank, sent in update.sent().items():
                assert [piece for piece, _ in sent] == [piece for piece, _ in shares.layout()[rank]]
                for piece, data in sent:
                    assert isinstance(data, Place) is is_staged
                    assert torch.equal(reading.get(data) if is_staged else data, values(piece))
            update.close()
            update.close()


def test_a_slice_that_a_rank_lacks_is_named(shares, subtests):
    for lacking in range(3):
        with subtests.test(lacking=lacking):
            update = SharedUpdate(1, shares, is_staged=False)
            for rank, held in shares.layout().items():
                for index, (piece, _) in enumerate(held):
                    if (rank, index) != (0, lacking):
                        update.write_to(rank, piece, values(piece))
            with pytest.raises(WeightSyncError, match=r"1 slices are not wholly written, .* for rank 0"):
                update.check()


def test_what_is_no_slice_of_a_rank_is_refused(shares):
    update = SharedUpdate(1, shares, is_staged=True)
    with pytest.raises(WeightSyncError, match="rank 2 does not exist: this vLLM has the ranks 0 to 1"):
        update.write_to(2, NORM, TENSORS["norm"])
    with pytest.raises(WeightSyncError, match="not in a tensor of"):
        update.write_to(0, rows(4, 7), torch.zeros(3, 4))
    update.close()


def test_memory_is_taken_as_it_is_needed_and_goes():
    before = len(list(Path("/proc/self/fd").iterdir()))
    staging, reading = Staging(100), Reading()
    many = [torch.randn(300_000) for _ in range(3)] + [torch.randn(3).bfloat16(), torch.zeros(0, 4), torch.tensor(2.5)]
    places = [staging.put(data) for data in many]
    assert len({place.path for place in places}) > 1
    for data, place in zip(many, places, strict=True):
        assert torch.equal(reading.get(place), data)
    staging.close()
    # What is mapped can still be read; what is not, cannot.
    assert torch.equal(reading.get(places[0]), many[0])
    with pytest.raises(WeightSyncError, match=r"cannot be read .*must live"):
        Reading().get(places[0])
    del reading
    assert len(list(Path("/proc/self/fd").iterdir())) <= before
