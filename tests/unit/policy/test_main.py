"""What a process calls its place."""

from __future__ import annotations

import types

import attrs
import pytest
from torch import nn

from cosmos_core.errors import DamagedCheckpointError
from cosmos_core.models.parallel.stages import _MARK, Part, Stages
from cosmos_core.policy import __main__ as main
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


@pytest.mark.parametrize(
    ("there", "damaged", "remedy"),
    [
        ((2, 4, 6), 6, "--from previous goes on from step 4"),
        ((2, 4, 6), 4, "--from step-2 goes on from step 2"),
        ((4,), 4, "--from step-0 goes on from the run's beginning"),
    ],
)
def test_a_damaged_checkpoint_is_told_with_a_start_that_there_is(there, damaged, remedy, tmp_path, monkeypatch):
    def restore(*_, **__):
        raise DamagedCheckpointError("it is damaged")

    monkeypatch.setattr(main, "restore", restore)
    for step in there:
        (tmp_path / "checkpoints" / f"step-{step}").mkdir(parents=True)
        (tmp_path / "checkpoints" / f"step-{step}" / "complete.json").touch()
    recipe = types.SimpleNamespace(model=types.SimpleNamespace(path=None))
    job = types.SimpleNamespace(
        directory=tmp_path, checkpoints=str(tmp_path / "checkpoints"), run_id="run", recipe=recipe
    )
    with pytest.raises(DamagedCheckpointError, match=f"it is damaged; cosmos run --resume {tmp_path} {remedy}$"):
        main._go_on_from(job, None, None, f"{job.checkpoints}/step-{damaged}")
