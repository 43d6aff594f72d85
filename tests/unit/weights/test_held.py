import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from cosmos_core.errors import WeightSyncError
from cosmos_core.testing.worlds import WorldFailedError, run_world
from cosmos_core.weights.digest import add_digests, tensor_digest
from cosmos_core.weights.held import all_held, held, owned
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
    assert [name for name in ("plain", "empty") if name in parts[0][0]] == ["plain", "empty"]
    # Rank 1 is the second of tp, which holds the same bias as the first.
    assert ["bias" in mine for mine, _ in parts] == [True, False, True, False]


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
