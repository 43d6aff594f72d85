"""Shares of matrices, quantised where they lie, are those of what one process would have made."""

import random

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from cosmos_core.errors import WeightSyncError
from cosmos_core.models.parallel.channel import open_channel
from cosmos_core.protocols.quantization import FORMATS
from cosmos_core.testing.worlds import run_world
from cosmos_core.weights.digest import add_digests, tensor_digests
from cosmos_core.weights.quantization import MatrixShare, matrix_shares, not_finite, quantise_tensors
from cosmos_core.weights.shards import local_shards, owned
from cosmos_core.weights.snapshot import take_snapshot

torch.set_num_threads(1)

NUM_CASES = 5


def matrices_of(seed):
    """Matrices, some of whose columns are not of whole blocks, with rows of different sizes; and a vector."""
    pick = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for index in range(6):
        shape = (pick.choice([1, 3, 8, 13]), 2 * pick.choice([1, 7, 16, 24, 32, 48, 64, 65]))
        if index % 3 == 2:
            shape = (pick.choice([2, 4, 5]), *shape)
        weights = torch.randn(shape, generator=generator)
        tensors[f"w{index}"] = weights * torch.exp(2 * torch.randn(*shape[:-1], 1, generator=generator))
    tensors["norm"] = torch.randn(5, generator=generator)
    return tensors


def placements_of(seed, name, tensor):
    """One for each dim of the mesh; the last dim is split evenly, so that no byte of two codes is cut."""
    pick = random.Random(f"{seed} {name}")
    choices = [Replicate(), *map(Shard, range(tensor.ndim))]
    chosen = [pick.choice(choices), pick.choice(choices)]
    is_fine = all(tensor.shape[-1] % 8 == 0 for each in chosen if each == Shard(tensor.ndim - 1))
    return chosen if is_fine else [Replicate(), Shard(0)]


def digests_of_shares(names, seeds):
    """For each format and seed, the digests that all processes together announce."""
    mesh, channel = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b")), open_channel()
    found = []
    for name in names:
        for seed in seeds:
            whole = matrices_of(seed)
            spread = {
                key: distribute_tensor(tensor, mesh, placements_of(seed, key, tensor)) for key, tensor in whole.items()
            }
            shapes = {key: tuple(tensor.shape) for key, tensor in whole.items() if key != "norm"}
            quantised = matrix_shares(FORMATS[name], spread, shapes)
            shares = local_shards(spread)
            mine = {key: shares[key] for key in owned(shares, channel.rank, channel.exchange)}
            snapshot = take_snapshot(0, mine, torch.bfloat16, quantised=quantised)
            everyones = [None] * dist.get_world_size()
            dist.all_gather_object(everyones, snapshot.digests())
            snapshot.file.close()
            found.append(add_digests(everyones))
    return found


def in_a_world(seeds):
    return digests_of_shares(FORMATS, seeds), refusals(FORMATS)


@pytest.fixture(scope="module")
def world():
    """What the first of four processes found: digests, and what each of them said of a matrix that is not finite."""
    return run_world(4, in_a_world, range(NUM_CASES))[0]


def test_any_spread_gives_the_digest_of_one_process(world):
    found = iter(world[0])
    for name in FORMATS:
        for seed in range(NUM_CASES):
            whole = matrices_of(seed)
            shapes = {key: tuple(tensor.shape) for key, tensor in whole.items() if key != "norm"}
            alone = quantise_tensors(FORMATS[name], whole, shapes)
            alone["norm"] = alone["norm"].bfloat16()
            assert next(found) == tensor_digests(alone), (name, seed)


def refusals(names):
    """What each process says of a matrix that is not finite on the last of them only."""
    mesh, found = init_device_mesh("cpu", (4,)), []
    weights = torch.ones(4, 8)
    weights[1, 6] = torch.nan
    spread = distribute_tensor(weights, mesh, [Shard(1)], src_data_rank=None)
    for name in names:
        (share,) = matrix_shares(FORMATS[name], {"w": spread}, {"w": (4, 8)}).values()
        *_, is_finite = share.quantise(spread.to_local())
        found.append(not_finite({"w": is_finite}))
    everyones = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, found)
    return everyones


def test_what_is_not_finite_anywhere_is_refused_by_all_who_share_it(world):
    assert len(world[1]) == 4
    for said in world[1]:
        assert all("w: it has elements that are not finite" in each for each in said)


def test_of_one_process_a_share_is_all():
    tensors = {"w": torch.randn(4, 33)}
    for form in FORMATS.values():
        (share,) = matrix_shares(form, tensors, {"w": (4, 33)}).values()
        expected = quantise_tensors(form, tensors, {"w": (4, 33)})
        *made, is_finite = share.quantise(tensors["w"])
        assert is_finite
        parts = dict(zip((part.name for part in share.parts()), made, strict=True))
        assert parts.keys() == expected.keys()
        assert all(torch.equal(parts[key].view(torch.uint8), expected[key].view(torch.uint8)) for key in parts)
        assert all(part.start == (0, 0) and part.size == part.shape for part in share.parts())


def test_a_byte_of_two_processes_is_refused():
    share = MatrixShare(form=FORMATS["mxfp4"], name="w", shape=(2, 6), start=(0, 3), size=(2, 3))
    with pytest.raises(WeightSyncError, match="w: a process holds its columns 3 to 6, but mxfp4 has two columns in"):
        share.parts()


def test_a_matrix_of_another_shape_is_refused():
    with pytest.raises(WeightSyncError, match=r"w: of shape \(2, 3\); the model's facts say \(3, 2\)"):
        matrix_shares(FORMATS["fp8"], {"w": torch.ones(2, 3)}, {"w": (3, 2)})
