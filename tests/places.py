"""Builds any process's part of a recipe's policy replica: on the meta device, in a fake group of the true size.

The mesh and what lays the model over it are the product's own; the group's collectives answer at once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from cosmos_core.config.mesh import world_size
from cosmos_core.config.schema import MeshConfig
from cosmos_core.plugins.recipe import load_model, load_plugins
from cosmos_core.policy.mesh.layout import layout_of
from cosmos_core.policy.mesh.mesh import DeviceMeshes, form_mesh
from cosmos_core.run.planning.memory import policy_memory
from cosmos_core.run.planning.plan import Plan


@contextlib.contextmanager
def fake_mesh(sizes: MeshConfig, rank: int = 0) -> Iterator[DeviceMeshes]:
    """The mesh of a process whose peers are not there."""
    if world_size(sizes) > 1:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size(sizes))
    try:
        yield form_mesh(sizes, "cpu")
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def check_places(plan: Plan) -> None:
    """Compare what the first, a middle and the last process of each pipeline place hold with the plan."""
    recipe = plan.job.recipe
    model, sizes = load_model(plan.job, load_plugins(recipe)), recipe.policy.mesh
    planned = [rank for rank in policy_memory(recipe, plan.parts.facts) for _ in range(rank.count)]
    assert len(planned) == world_size(sizes)
    per_place = world_size(sizes) // sizes.pp
    for place in range(sizes.pp):
        for rank in sorted({place * per_place + each for each in (0, per_place // 2 + 1, per_place - 1)}):
            with fake_mesh(sizes, rank) as mesh:
                layout = layout_of(recipe.policy, mesh, "cpu")
                device = torch.device("meta")
                module = model.build(seed=0, dtype=torch.float32, device=device, layout=layout)
                parameters = [*module.parameters(), *(copy for _, copy in getattr(module, "copies", ()))]
                held = sum(each.to_local().nbytes if isinstance(each, DTensor) else each.nbytes for each in parameters)
            # Of what the processes do not divide, the plan counts the mean.
            where = planned[rank].host if recipe.policy.parallel.cpu_offload else planned[rank].device
            expected = pytest.approx(where["parameters"], rel=1e-3)
            assert held == expected, f"{recipe.run.name}, process {rank}"
