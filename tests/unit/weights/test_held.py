import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from cosmos_core.errors import WeightSyncError
from cosmos_core.testing.worlds import WorldFailedError, run_world
from cosmos_core.weights.digest import add_digests, tensor_digest
from cosmos_core.weights.held import all_held, held, owned, spreads
from cosmos_core.weights.shards import canonical_tensors

torch.set_num_threads(1)


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
    shares = all_held(canonical_tensors(spread_over_two_axes()))
    mine = owned(shares, dist.get_rank(), exchange)
    whole = {**whole_tensors(), "plain": torch.arange(3.0)}
    for name, share in shares.items():
        assert torch.equal(share.tensor, whole[name][share.index]), name
    return mine, {
        name: tensor_digest(name, shares[name].tensor, start=shares[name].placement.start, shape=whole[name].shape)
        for name in mine
    }


def test_shares_are_boxes_and_each_element_has_one_owner():
    parts = run_world(4, shares_of_two_axes)
    whole = {**whole_tensors(), "plain": torch.arange(3.0)}
    assert add_digests(digests for _, digests in parts) == {n: tensor_digest(n, t) for n, t in whole.items()}
    # Both of tp hold the same half of the bias.
    assert sorted(["bias" in mine for mine, _ in parts[:2]]) == [False, True]
    assert sum("plain" in mine for mine, _ in parts) == 1


def equal_shares():
    """Both processes hold every one of 9 tensors whole, and rank 1 another one alone."""
    rank = dist.get_rank()
    sizes = {f"w{number}": 100 + 10 * number for number in range(9)} | ({"alone": 300} if rank else {})
    shares = all_held({name: torch.zeros(size) for name, size in sizes.items()})
    first = {name: spread.boxes[0].rank for name, spread in spreads(shares, exchange).items()}
    return sum(sizes[name] for name in owned(shares, rank, exchange)), first


def test_processes_with_equal_shares_divide_them():
    (zero, first), (one, again) = run_world(2, equal_shares)
    assert zero + one == sum(100 + 10 * number for number in range(9)) + 300
    assert abs(zero - one) <= 100
    # Where nothing is sent, the lowest rank speaks: it has them at hand.
    assert first == again == {"alone": 1} | dict.fromkeys([f"w{number}" for number in range(9)], 0)


def test_a_plain_tensor_is_held_whole():
    share = held(torch.nn.Parameter(torch.ones(2, 3)))
    assert (share.placement.start, share.placement.shape) == ((0, 0), (2, 3))
    assert not share.tensor.requires_grad


def overlapping():
    tensor = torch.zeros(4, 2)
    share = held(tensor)
    rows = 3 if dist.get_rank() else 2
    object.__setattr__(share, "tensor", tensor[:rows])
    owned({"w": share}, dist.get_rank(), exchange)


def test_shares_that_overlap_in_part_are_refused():
    with pytest.raises(WorldFailedError, match=rf"{WeightSyncError.__name__}: w: .* hold 10 of its 8 elements"):
        run_world(2, overlapping)
