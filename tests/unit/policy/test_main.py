"""What a process calls its place."""

from __future__ import annotations

import attrs
from torch import nn

from cosmos_core.models.parallel.stages import _MARK, Part, Stages
from cosmos_core.policy.__main__ import place_of
from cosmos_core.policy.processes.world import World, single_world


@attrs.frozen
class Placed:
    """A mesh of 2 pipeline stages x 4 shards, seen from process 5."""

    rank: int = 5
    world_size: int = 8

    def size(self, axis):
        return {"pp": 2, "dp_shard": 4}.get(axis, 1)

    def place(self, axis):
        return {"pp": 1, "dp_shard": 1}[axis]


def stage(layers):
    module = nn.Linear(1, 1)
    setattr(module, _MARK, Part(index=0, num_stages=4, layers=layers, canonical={}))
    return module


def test_a_process_says_its_place_on_the_mesh():
    assert place_of(single_world(), nn.Linear(1, 1)) == "the replica's only process"
    place = "rank 5 of 8, pp 1 of 2, dp_shard 1 of 4"
    assert place_of(World(Placed()), nn.Linear(1, 1)) == place
    module = Stages([stage(range(3, 6)), stage(range(9, 12))])
    assert place_of(World(Placed()), module) == f"{place}, layers 3 to 5 and 9 to 11"
