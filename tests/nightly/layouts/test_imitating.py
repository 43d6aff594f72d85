"""Demonstrations beside rollouts are the same step in any layout, whoever has them."""

from __future__ import annotations

import attrs
import pytest

from cosmos_core.config.schema import MeshConfig, ParallelConfig, PolicyConfig
from cosmos_core.policy.mesh.mesh import form_mesh
from cosmos_core.policy.processes.group import solo
from cosmos_core.policy.processes.world import World, single_world
from cosmos_core.policy.training.metrics import Meter, Stopwatch
from cosmos_core.protocols import Loss
from cosmos_core.testing.layouts import Imitation, make_trainer, share_of, whole, worst_error
from cosmos_core.testing.worlds import run_world
from tests.families import CONFIGS, family, text_payloads


class Both(Imitation):
    num_demonstrations = 1

    def imitation(self, decisions):
        return Loss(loss_N=decisions.logprobs_N.square())


def policy(**mesh):
    return PolicyConfig(
        precision="fp32", micro_batch_units=64, mesh=MeshConfig(**mesh), parallel=ParallelConfig(compile="off")
    )


NUMBERS = (1, 4)
LAYOUTS = {"fsdp": policy(dp_shard=2), "tp": policy(tp=2), "pp": policy(pp=2), "cp": policy(cp=2)}


def step(settings, world, number):
    """A step with so many demonstrations: with one, a process of two has none, and keeps step."""
    trainer = make_trainer(family("hf", CONFIGS["qwen3"])(), settings, world)
    stage = trainer.stage
    trainer.begin_stage(stage, Both(), 1.0)
    share = share_of(text_payloads(), world)
    imitated = share_of(text_payloads(seed=3, number=max(number, 2)), world)
    if number < 2:
        first = world.mesh.place("dp_shard") == 0
        one = text_payloads(seed=3, number=2)[:1]
        alone = share_of(one, single_world())
        sequences = alone.sequences if first else ()
        imitated = attrs.evolve(alone, sequences=sequences, filler=alone.sequences[0])
    share = attrs.evolve(share, imitated=imitated)
    applied = trainer.train(share, share.counts, solo(), Stopwatch(trainer.device), imitated.counts)
    loss = Meter.merged(world.exchange(applied.meter.encode())).report()["imitation_loss"]
    return whole({name: p.grad for name, p in trainer.module.named_parameters() if p.grad is not None}, world), loss


def in_layouts():
    worlds = [(settings, World(form_mesh(settings.mesh, "cpu"))) for settings in LAYOUTS.values()]
    return [[step(settings, world, number) for number in NUMBERS] for settings, world in worlds]


def test_the_step_does_not_depend_on_who_has_the_demonstrations():
    alone = [step(policy(), single_world(), number) for number in NUMBERS]
    for layout, steps in zip(LAYOUTS, run_world(2, in_layouts, timeout_s=240.0)[0], strict=True):
        for number, (found, loss), (expected, own) in zip(NUMBERS, steps, alone, strict=True):
            name, error = worst_error(found, expected)
            assert error <= 1e-5, (layout, number, name, error)
            assert loss == pytest.approx(own, rel=1e-5), (layout, number)
    assert worst_error(alone[0][0], alone[1][0])[1] > 1e-3, "demonstrations do not matter, so nothing is proved"
