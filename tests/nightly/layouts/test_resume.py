"""A checkpoint of eight processes goes on in other layouts, as if it had never been written."""

from __future__ import annotations

import functools

import pytest
import torch

from cosmos_core.models.parallel.channel import open_channel
from cosmos_core.policy.checkpoints.checkpoint import Place
from cosmos_core.policy.checkpoints.reader import restore
from cosmos_core.policy.checkpoints.saver import copy_state, write_checkpoint
from cosmos_core.policy.mesh.mesh import form_mesh
from cosmos_core.policy.processes.world import World, single_world
from cosmos_core.testing.layouts import make_trainer, train_step, whole, worst_error
from cosmos_core.testing.worlds import run_world
from tests.families import CONFIGS, family, text_payloads
from tests.nightly.layouts.test_matrix import policy

BEFORE, AFTER = 2, 3


def steps(trainer, numbers):
    for number in numbers:
        train_step(trainer, text_payloads(seed=number))


def parameters(trainer):
    return whole(dict(trainer.module.named_parameters()), trainer.world)


def save(name, settings, folder):
    world = World(form_mesh(settings.mesh, "cpu"))
    trainer = make_trainer(family("hf", CONFIGS[name])(), settings, world)
    steps(trainer, range(BEFORE))
    place = Place(run_id="test", step=trainer.step, stage=0, nonfinite_steps=0)
    return write_checkpoint(folder, copy_state(trainer.state(), place), open_channel())


def resume(name, settings, path, world=None):
    world = world or World(form_mesh(settings.mesh, "cpu"))
    # Another seed: what is not restored shows.
    trainer = make_trainer(family("hf", CONFIGS[name])(), settings, world, seed=99)
    restore(trainer, path, lambda index: None)
    assert trainer.step == BEFORE
    steps(trainer, range(BEFORE, BEFORE + AFTER))
    return parameters(trainer)


@functools.cache
def uninterrupted(name, optimizer):
    trainer = make_trainer(family("hf", CONFIGS[name])(), policy(optimizer=optimizer), single_world())
    steps(trainer, range(BEFORE + AFTER))
    return parameters(trainer)


@pytest.fixture(scope="module", params=[("qwen3-uneven-tied", "muon"), ("qwen3-moe", "adamw")])
def saved(request, tmp_path_factory):
    name, optimizer = request.param
    axes = {"pp": 2, "dp_shard": 2, "tp": 2, **({"ep": 4} if name == "qwen3-moe" else {})}
    folder = tmp_path_factory.mktemp("checkpoints")
    return *request.param, run_world(8, save, name, policy(optimizer=optimizer, **axes), str(folder))[0]


@pytest.mark.parametrize("axes", [{}, {"dp_shard": 2, "cp": 2}, {"pp": 4}], ids=["one process", "fsdp cp", "pp"])
def test_resumes_elsewhere(saved, axes):
    name, optimizer, path = saved
    settings = policy(optimizer=optimizer, **axes)
    if axes:
        (found, *_) = run_world(4, resume, name, settings, path)
    else:
        found = resume(name, settings, path, single_world())
    worst, error = worst_error(found, uninterrupted(name, optimizer))
    assert error <= 1e-4, (worst, error)


def test_resuming_is_exact_in_the_same_process(tmp_path):
    """What is restored is every bit of weights and optimizer."""
    trainer = make_trainer(family("hf", CONFIGS["qwen3"])(), policy(), single_world())
    steps(trainer, range(BEFORE))
    place = Place(run_id="test", step=trainer.step, stage=0, nonfinite_steps=0)
    path = write_checkpoint(str(tmp_path), copy_state(trainer.state(), place))
    found = resume("qwen3", policy(), path, single_world())
    assert all(torch.equal(tensor, uninterrupted("qwen3", "adamw")[key]) for key, tensor in found.items())
