"""The average of the weights is the same in any layout: followed, consulted, published, and put back."""

from __future__ import annotations

import attrs
import pytest
import torch

from cosmos_core.config.schema import (
    AverageConfig,
    LoraConfig,
    MeshConfig,
    OptimizerConfig,
    ParallelConfig,
    PolicyConfig,
)
from cosmos_core.policy.mesh.mesh import form_mesh
from cosmos_core.policy.processes.group import solo
from cosmos_core.policy.processes.world import World, single_world
from cosmos_core.policy.training.metrics import Meter, Stopwatch
from cosmos_core.protocols import Loss
from cosmos_core.testing.layouts import Imitation, make_trainer, share_of, whole, worst_error
from cosmos_core.testing.worlds import run_world
from tests.families import CONFIGS, family, text_payloads
from tests.merging import published


class Near(Imitation):
    """Imitates, and stays near its own average."""

    consults = {"average": None}  # noqa: RUF012 - the trainer reads it

    def loss(self, decisions):
        apart_N = decisions.logprobs_N - decisions.frozen["average"].logprobs_N
        return Loss(loss_N=-decisions.logprobs_N + apart_N.square())


def policy(lora=None, reshard="auto", **mesh):
    return PolicyConfig(
        precision="fp32",
        micro_batch_units=64,
        mesh=MeshConfig(**mesh),
        parallel=ParallelConfig(compile="off", reshard_after_forward=reshard),
        lora=lora,
        average=AverageConfig(decay=0.6, growth=0.2, publish=True),
    )


LORA = LoraConfig(rank=2)
LAYOUTS = {
    "fsdp": policy(dp_shard=2),
    "gathered": policy(dp_shard=2, reshard="never"),
    "tp": policy(tp=2),
    "pp": policy(pp=2),
    "cp": policy(cp=2),
    "adapters": policy(LORA, dp_shard=2),
}


def three_steps(settings, world):
    """The average, what is published of it, and the loss of the last step."""
    trainer = make_trainer(family("hf", CONFIGS["qwen3"])(), settings, world)
    optimizer = OptimizerConfig(lr=1e-2, eps=1e-3)
    trainer.begin_stage(attrs.evolve(trainer.stage, optimizer=optimizer), Near(), 1.0)
    share = share_of(text_payloads(), world)
    for _ in range(3):
        applied = trainer.train(share, share.counts, solo(), Stopwatch(trainer.device))
    state = {name: each for name, each in trainer.state().items() if name.startswith("average.")}
    with trainer.published():
        given = whole(published(trainer.module), world)
    loss = Meter.merged(world.exchange(applied.meter.encode())).report()["loss"]
    return whole(state, world), given, loss


def in_layouts():
    return [three_steps(settings, World(form_mesh(settings.mesh, "cpu"))) for settings in LAYOUTS.values()]


def test_the_average_is_that_of_one_process():
    alone = {lora: three_steps(policy(lora), single_world()) for lora in (None, LORA)}
    for layout, (state, given, loss) in zip(LAYOUTS, run_world(2, in_layouts, timeout_s=240.0)[0], strict=True):
        expected = alone[LAYOUTS[layout].lora]
        assert state.keys() == expected[0].keys(), layout
        for found, own in ((state, expected[0]), (given, expected[1])):
            name, error = worst_error(found, own)
            assert error <= 1e-5, (layout, name, error)
        assert loss == pytest.approx(expected[2], rel=1e-5), layout
    assert all(torch.isfinite(each).all() for each in alone[None][0].values())
