import attrs
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from cosmos_core.errors import WeightSyncError
from cosmos_core.protocols import TensorSlice
from cosmos_core.testing.worlds import run_world
from cosmos_core.weights.digest import add_digests, tensor_digest
from cosmos_core.weights.shards import (
    ShardMap,
    TensorFacts,
    canonical_tensors,
    local_shard,
    local_shards,
    owned,
    shard_owners,
    torch_dtype,
)

torch.set_num_threads(1)


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(5, 3)
        self.head = torch.nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(2))
        self.register_buffer("cache", torch.ones(2), persistent=False)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))


def test_a_module_travels_as_its_parameters_once_and_its_persistent_float_buffers():
    tensors = canonical_tensors(Tied())
    assert list(tensors) == ["embed.weight", "scale"]
    assert not any(tensor.requires_grad for tensor in tensors.values())


def test_an_engines_ranks_together_say_how_large_a_tensor_is():
    halves = {rank: [(TensorSlice(name="w", start=(0, 2 * rank), shape=(3, 2)), "torch.bfloat16")] for rank in range(2)}
    shards = ShardMap.of_layout(halves)
    assert shards.tensors["w"] == TensorFacts(shape=(3, 4), dtype="bfloat16")
    assert set(shards.ranks) == {0, 1}


def test_ranks_that_disagree_are_refused():
    piece = TensorSlice(name="w", start=(0,), shape=(2,))
    with pytest.raises(WeightSyncError, match="w: the engine's ranks disagree: float32"):
        ShardMap.of_layout({0: [(piece, "float32")], 1: [(piece, "bfloat16")]})


def test_an_unknown_dtype_is_refused():
    with pytest.raises(WeightSyncError, match="'float3' is not a torch dtype"):
        torch_dtype("float3")


def whole_tensors():
    generator = torch.Generator().manual_seed(0)
    shapes = {"even": (8, 6), "uneven": (7, 5), "few": (1, 3), "bias": (5,), "empty": (0, 4)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def exchange(said):
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, said)
    return found


def spread_over_two_axes():
    """Rows over tp, then over FSDP; `bias` on every process of tp; a plain buffer on all."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    module = torch.nn.Module()
    for name, tensor in whole_tensors().items():
        placements = [Replicate() if name == "bias" else Shard(0)]
        module.register_parameter(name, torch.nn.Parameter(distribute_tensor(tensor, mesh["tp"], placements)))
    module.register_buffer("plain", torch.arange(3.0))
    fully_shard(module, mesh=mesh["fsdp"])
    return module


def shares_of_two_axes():
    shares = local_shards(canonical_tensors(spread_over_two_axes()))
    mine = owned(shares, dist.get_rank(), exchange)
    whole = {**whole_tensors(), "plain": torch.arange(3.0)}
    for name, share in shares.items():
        assert torch.equal(share.tensor, whole[name][share.index]), name
    return mine, {
        name: tensor_digest(name, shares[name].tensor, start=shares[name].start, shape=whole[name].shape)
        for name in mine
    }


def test_shares_are_boxes_and_each_element_has_one_owner():
    parts = run_world(4, shares_of_two_axes)
    whole = {**whole_tensors(), "plain": torch.arange(3.0)}
    assert add_digests(digests for _, digests in parts) == {n: tensor_digest(n, t) for n, t in whole.items()}
    # Both of tp hold the same half of the bias.
    assert sorted(["bias" in mine for mine, _ in parts[:2]]) == [False, True]
    assert sum("plain" in mine for mine, _ in parts) == 1


def exchanges(*ranks):
    """An exchange of processes that hold these shards."""
    said = []
    for shares in ranks:
        shard_owners(shares, lambda mine: said.append(mine) or [])
    return lambda _: said


def test_processes_with_equal_shares_divide_them():
    """Both processes hold every one of 9 tensors whole, and rank 1 another one alone."""
    sizes = {f"w{number}": 100 + 10 * number for number in range(9)}
    ranks = [local_shards({name: torch.zeros(size) for name, size in sizes.items()}) for _ in range(2)]
    ranks[1].update(local_shards({"alone": torch.zeros(300)}))
    exchange = exchanges(*ranks)
    mine = [owned(shares, rank, exchange) for rank, shares in enumerate(ranks)]
    zero, one = (sum({**sizes, "alone": 300}[name] for name in names) for names in mine)
    assert zero + one == sum(sizes.values()) + 300
    assert abs(zero - one) <= 100
    # Where nothing is sent, the lowest rank speaks: it has them at hand.
    owners = {name: list(ranks.values()) for name, ranks in shard_owners(ranks[0], exchange).items()}
    assert owners == {"alone": [1]} | {name: [0] for name in sizes}


def test_a_plain_tensor_is_held_whole():
    share = local_shard(torch.nn.Parameter(torch.ones(2, 3)))
    assert (share.start, share.shape) == ((0, 0), (2, 3))
    assert not share.tensor.requires_grad


def test_shares_that_overlap_in_part_are_refused():
    ranks = [{"w": attrs.evolve(local_shard(torch.zeros(4, 2)), tensor=torch.zeros(rows, 2))} for rows in (2, 3)]
    with pytest.raises(WeightSyncError, match=r"^w: .* hold 10 of its 8 elements"):
        owned(ranks[0], 0, exchanges(*ranks))
