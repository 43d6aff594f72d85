"""What the processes of a replica tell each other."""

from __future__ import annotations

import torch

from cosmos_core.config.schema import MeshConfig
from cosmos_core.models.parallel.channel import SMALL_BYTES
from cosmos_core.policy.mesh.mesh import form_mesh
from cosmos_core.policy.processes.world import World, single_world
from cosmos_core.testing.worlds import run_world

LENGTHS = (0, 1, SMALL_BYTES, SMALL_BYTES + 1, 100_000)


def said(rank, length):
    return bytes([rank + 1]) * length


def talk():
    world = World(form_mesh(MeshConfig(dp_shard=3), "cpu"))
    asked = []
    total = torch.full((2,), float(world.rank), dtype=torch.float64)
    return {
        "rank": (world.rank, world.size, world.is_leader),
        "agree": [world.agree(True), world.agree(world.rank != 1), world.agree(True, lambda: asked.append(1))],
        "share": [world.share(said(world.rank, length)) for length in LENGTHS],
        # Each process says as much as another says at another time.
        "exchange": [
            world.exchange(said(world.rank, LENGTHS[(index + world.rank) % len(LENGTHS)]))
            for index in range(len(LENGTHS))
        ],
        "most": world.most((5, 7, 6)[world.rank]),
        "sum": world.sum(total).tolist(),
        "same": world.sum(total) is total,
    }


def test_three_processes_talk():
    heard = run_world(3, talk)
    assert [each["rank"] for each in heard] == [(0, 3, True), (1, 3, False), (2, 3, False)]
    for each in heard:
        assert each["agree"] == [True, False, True]
        assert each["share"] == [said(0, length) for length in LENGTHS]
        for index, answers in enumerate(each["exchange"]):
            assert answers == [said(rank, LENGTHS[(index + rank) % len(LENGTHS)]) for rank in range(3)]
        assert each["most"] == 7
        assert each["sum"] == [3.0, 3.0]
        assert each["same"]


def wait_for_one():
    import time

    world = World(form_mesh(MeshConfig(dp_shard=2), "cpu"))
    asked = []
    if world.rank == 1:
        time.sleep(0.3)
    world.agree(True, lambda: asked.append(1))
    return len(asked)


def test_the_one_that_waits_looks_around():
    waited, came = run_world(2, wait_for_one)
    assert waited > 5
    assert came <= waited


def test_one_process_needs_nobody():
    world = single_world()
    assert (world.rank, world.size, world.is_leader) == (0, 1, True)
    assert not world.agree(False)
    assert world.share(b"a") == b"a"
    assert world.exchange(b"a") == [b"a"]
    assert world.most(3) == 3
    assert float(world.sum(torch.tensor(2.0))) == 2.0
