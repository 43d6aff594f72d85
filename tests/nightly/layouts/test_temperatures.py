"""A batch that was drawn at several temperatures is the same step in any layout."""

from __future__ import annotations

import functools

import attrs

from cosmos_core.config.schema import MeshConfig, ParallelConfig, PolicyConfig
from cosmos_core.policy.mesh.mesh import form_mesh
from cosmos_core.policy.processes.group import solo
from cosmos_core.policy.processes.world import World, single_world
from cosmos_core.policy.training.metrics import Stopwatch
from cosmos_core.testing.layouts import make_trainer, share_of, whole, worst_error
from cosmos_core.testing.worlds import run_world
from tests.families import CONFIGS, family, text_payloads

COLD = 0.5


def policy(**mesh):
    return PolicyConfig(
        precision="fp32",
        micro_batch_units=64,
        mesh=MeshConfig(**mesh),
        parallel=ParallelConfig(compile="off"),
    )


LAYOUTS = {"fsdp": policy(dp_shard=2), "tp": policy(tp=2), "pp": policy(pp=2), "cp": policy(cp=2)}


def gradients(settings, world, cold):
    """Of a step whose sequences with these lengths of completion, which few processes have, were drawn cold."""
    trainer = make_trainer(family("hf", CONFIGS["qwen3-tied"])(), settings, world)
    share = share_of(text_payloads(), world)
    sequences = tuple(
        attrs.evolve(each, temperature=COLD if each.payload.arrays["completion"].shape[0] in cold else None)
        for each in share.sequences
    )
    share = attrs.evolve(share, sequences=sequences, temperatures=(None, COLD))
    trainer.train(share, share.counts, solo(), Stopwatch(trainer.device))
    return whole({name: p.grad for name, p in trainer.module.named_parameters() if p.grad is not None}, world)


def in_layouts(cold):
    worlds = [(settings, World(form_mesh(settings.mesh, "cpu"))) for settings in LAYOUTS.values()]
    return [gradients(settings, world, cold) for settings, world in worlds]


@functools.cache
def alone(*cold):
    return gradients(policy(), single_world(), cold)


def test_the_step_does_not_depend_on_who_has_the_sequences_of_a_temperature():
    lengths = sorted(payload.arrays["completion"].shape[0] for payload in text_payloads())
    cold = (lengths[-1],)
    for layout, found in zip(LAYOUTS, run_world(2, in_layouts, cold, timeout_s=240.0)[0], strict=True):
        name, error = worst_error(found, alone(*cold))
        assert error <= 1e-5, (layout, name, error)
    _, changed = worst_error(alone(*cold), alone())
    assert changed > 1e-2, "the temperature does not matter, so nothing is proved"
