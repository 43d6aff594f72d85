"""Checkpoints of any layout are read in any other, bit by bit."""

import resource
import signal
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from cosmos_core.config.schema import OptimizerConfig
from cosmos_core.errors import CheckpointError
from cosmos_core.models.parallel.channel import Channel, open_channel
from cosmos_core.policy.checkpoints.checkpoint import Place
from cosmos_core.policy.checkpoints.reader import CheckpointReader, load_shares, restore
from cosmos_core.policy.checkpoints.saver import CheckpointSaver, copy_state, write_checkpoint
from cosmos_core.policy.training.optimizers import Optimizer
from cosmos_core.testing.worlds import run_world
from cosmos_core.transport.reports import CheckpointFailed, CheckpointSaved
from cosmos_core.weights.shards import canonical_tensors, local_shards

torch.set_num_threads(1)

PLACE = Place(run_id="r", step=3, stage=0, nonfinite_steps=0)


def make(layout, seed, num_outputs=1):
    """A module of three layers with a trained optimizer (matrices by Muon, biases by AdamW), wherever."""
    torch.manual_seed(seed)
    module = torch.nn.Sequential(torch.nn.Linear(6, 7), torch.nn.Linear(7, 4), torch.nn.Linear(4, num_outputs))
    if layout == "tp x fsdp":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
        for layer, placement in zip(module, (Shard(0), Shard(1), Shard(0)), strict=True):
            weight = distribute_tensor(layer.weight.detach(), mesh["tp"], [placement])
            bias = distribute_tensor(layer.bias.detach(), mesh["tp"], [Shard(0) if placement.dim == 0 else Replicate()])
            layer.weight, layer.bias = torch.nn.Parameter(weight), torch.nn.Parameter(bias)
        fully_shard(module, mesh=mesh["fsdp"])
    elif layout == "hsdp":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "fsdp"))
        fully_shard(module, mesh=mesh)
    elif layout == "pp":
        # Each process has one stage; the names are those of the whole.
        for other in ((1, 2), (0,))[dist.get_rank()]:
            module[other] = torch.nn.Identity()
    optimizer = Optimizer(module, OptimizerConfig(kind="muon"))
    torch.manual_seed(seed)
    for parameter in module.parameters():
        parameter.grad = parameter.detach().clone()
    optimizer.step(0.1, 0.0)
    model = {f"model.{name}": tensor for name, tensor in canonical_tensors(module).items()}
    return model | {f"optimizer.{name}": tensor for name, tensor in optimizer.state().items()}


def save(layout, folder):
    state = make(layout, 0)
    channel = open_channel()
    write_checkpoint(folder, copy_state(state, PLACE), channel)


def load(layout, path):
    """What is read differs from what was there before, and equals what one process had."""
    shares = local_shards(make(layout, 5))
    load_shares(path, shares)
    expected = make("one", 0)
    for name, share in shares.items():
        assert torch.equal(share.tensor, expected[name][share.index]), name
    return sorted(shares)


SIZES = {"one": 1, "pp": 2, "hsdp": 4, "tp x fsdp": 4}


def check_another_layout(tmp_path, saved, loaded):
    run_world(SIZES[saved], save, saved, str(tmp_path))
    path = tmp_path / "step-3"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["step-3"]
    names = run_world(SIZES[loaded], load, loaded, str(path))
    expected = sorted(make("one", 0))
    assert sorted({name for some in names for name in some}) == expected
    metadata = CheckpointReader(str(path)).read_metadata()
    assert sorted(metadata.state_dict_metadata) == [*expected, "rng"]
    nbytes = sum(info.length for info in metadata.storage_data.values())
    written = sum(file.stat().st_size for file in path.glob("*.distcp"))
    assert nbytes == written


def test_a_checkpoint_is_read_in_another_layout(tmp_path):
    check_another_layout(tmp_path, "tp x fsdp", "pp")


def resume_another(layout, path):
    """What a process says of a checkpoint whose last layer has another width."""
    state = make(layout, 5, num_outputs=3)
    world = SimpleNamespace(exchange=open_channel().exchange)
    trainer = SimpleNamespace(stage=SimpleNamespace(index=0), state=lambda: state, world=world)
    with pytest.raises(CheckpointError) as caught:
        restore(trainer, path, lambda index: None)
    return str(caught.value)


def check_another_model(tmp_path, layout):
    """In a pipeline the first process holds nothing that differs."""
    run_world(1, save, "one", str(tmp_path))
    path = str(tmp_path / "step-3")
    (said,) = set(run_world(SIZES[layout], resume_another, layout, path))
    assert said == f"{path} is of another model: model.2.weight has shape (1, 4) there and (3, 4) here"


def test_every_process_says_that_a_checkpoint_is_of_another_model(tmp_path):
    check_another_model(tmp_path, "pp")


def test_what_the_planner_finds_is_of_another_model_too(tmp_path, monkeypatch):
    run_world(1, save, "one", str(tmp_path))
    monkeypatch.setattr("cosmos_core.policy.checkpoints.reader._differences", lambda *_: iter(()))
    with pytest.raises(CheckpointError, match=r"of another model: model\.2\.weight has shape \(1, 4\) there and \(3"):
        load_shares(str(tmp_path / "step-3"), local_shards(make("one", 5, num_outputs=3)))


def save_in_background(folder, failing):
    state = make("hsdp", 0)
    outcomes = []
    saver = CheckpointSaver(folder, 2, outcomes.append, open_channel())
    if failing and dist.get_rank() == 1:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
    saver.save(state, PLACE)
    with torch.no_grad():
        for tensor in state.values():
            tensor.zero_()
    saver.wait()
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return outcomes


def test_the_leader_alone_reports(tmp_path):
    outcomes = run_world(4, save_in_background, str(tmp_path), False)
    assert outcomes == [[CheckpointSaved(step=3, path=str(tmp_path / "step-3"), generation=0)], [], [], []]
    load("one", str(tmp_path / "step-3"))


def test_one_process_that_cannot_write_fails_the_checkpoint_for_all(tmp_path):
    (failed,), *others = run_world(4, save_in_background, str(tmp_path), True)
    assert isinstance(failed, CheckpointFailed)
    assert "File too large" in failed.reason
    assert others == [[], [], []]
    assert list(tmp_path.iterdir()) == []


def test_a_channel_of_one_needs_no_group():
    channel = Channel()
    assert (channel.rank, channel.size, channel.is_leader) == (0, 1, True)
    assert channel.exchange(b"x") == [b"x"]
