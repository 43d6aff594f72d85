"""The digest of what lies below adapters is one, however it is spread, and tells every change."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from cosmos_core.errors import CheckpointError
from cosmos_core.models.parallel.channel import Channel, open_channel
from cosmos_core.policy.checkpoints.frozen_digest import check_below, frozen_digest
from cosmos_core.testing.worlds import run_world

torch.set_num_threads(1)


def make():
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(6, 7), torch.nn.Linear(7, 1))
    module[0].requires_grad_(requires_grad=False)
    return module


def digest(module):
    return frozen_digest(module, 0, Channel().exchange)


def spread_digest():
    module = make()
    fully_shard(module, mesh=init_device_mesh("cpu", (2,)))
    return frozen_digest(module, dist.get_rank(), open_channel().exchange)


def test_the_layout_does_not_matter():
    assert set(run_world(2, spread_digest)) == {digest(make())}


@torch.no_grad()
def test_frozen_weights_alone_count():
    module = make()
    module[1].weight += 1
    assert digest(module) == digest(make())
    module[0].bias[3] += 1e-6
    assert digest(module) != digest(make())


def test_other_weights_are_refused_by_name():
    check_below("/run/step-1", expected="a", found="a", name="/base")
    with pytest.raises(CheckpointError, match="/run/step-1 has adapters for other weights than those of /base"):
        check_below("/run/step-1", expected="a", found="b", name="/base")
