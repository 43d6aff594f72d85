"""Weights that are published in few bits: from any layout the very codes and scales that one process would publish."""

from __future__ import annotations

import functools

import pytest
import torch

from cosmos_core.config.schema import MeshConfig, PolicyConfig
from cosmos_core.models.facts import column_split, matrices_of
from cosmos_core.models.parallel.channel import open_channel
from cosmos_core.models.parallel.plan import plan_for
from cosmos_core.models.weights.loading import make_shell
from cosmos_core.policy.mesh.mesh import form_mesh
from cosmos_core.policy.processes.world import World, single_world
from cosmos_core.policy.publication import Publications
from cosmos_core.protocols.quantization import FORMATS
from cosmos_core.testing.layouts import make_trainer
from cosmos_core.testing.worlds import run_world
from cosmos_core.weights.publisher import WeightPublisher
from cosmos_core.weights.shards import canonical_tensors, local_shard
from tests.families import CONFIGS, family

torch.set_num_threads(1)

LAYOUTS = {
    "llama": [{"dp_shard": 4}, {"dp_shard": 2, "tp": 2}, {"tp": 4}, {"dp_replicate": 2, "tp": 2}, {"pp": 2, "tp": 2}],
    "qwen3-moe": [{"dp_shard": 2, "tp": 2}, {"dp_shard": 4, "ep": 2}, {"dp_shard": 2, "tp": 2, "ep": 4}],
}


def policy(mesh):
    return PolicyConfig(precision="fp32", micro_batch_units=64, mesh=MeshConfig(**mesh))


def published(name, mesh, world):
    """Digest and bytes of each format."""
    model = family("hf", CONFIGS[name])()
    trainer = make_trainer(model, policy(mesh), world)
    tensors = canonical_tensors(trainer.module)
    matrices = matrices_of(make_shell(model.config, model.auto_class, trust_remote_code=False))
    reports = []
    with WeightPublisher("run") as publisher:
        for form in FORMATS.values():
            publications = Publications(
                publisher,
                torch.bfloat16,
                reports.append,
                open_channel(),
                form=form,
                matrices=matrices,
            )
            publications.publish(1, tensors)
            publications.close()
    return [(report.digest, report.nbytes) for report in reports]


def published_in(name, meshes):
    return [published(name, mesh, World(form_mesh(policy(mesh).mesh, "cpu"))) for mesh in meshes]


@functools.cache
def alone(name):
    return published(name, {}, single_world())


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_what_is_published_does_not_depend_on_the_layout(name):
    found = run_world(4, published_in, name, LAYOUTS[name], timeout_s=240.0)[0]
    assert len({digest for digest, _ in alone(name)}) == len(FORMATS)
    for mesh, each in zip(LAYOUTS[name], found, strict=True):
        assert each == alone(name), mesh


def split_by_columns(name):
    """Names of the matrices of which this process has some columns only, and those that planning names."""
    mesh = {"tp": 2}
    model = family("hf", CONFIGS[name])()
    trainer = make_trainer(model, policy(mesh), World(form_mesh(policy(mesh).mesh, "cpu")))
    shell = make_shell(model.config, model.auto_class, trust_remote_code=False)
    matrices = matrices_of(shell)
    parts = {
        each: local_shard(tensor) for each, tensor in canonical_tensors(trainer.module).items() if each in matrices
    }
    found = {each for each, part in parts.items() if part.tensor.shape[-1] < part.shape[-1]}
    return found, column_split(shell, plan_for(shell, {})) & matrices.keys()


@pytest.mark.parametrize("name", LAYOUTS)
def test_planning_knows_whose_columns_are_split(name):
    for found, told in run_world(2, split_by_columns, name):
        assert found
        assert found == told
