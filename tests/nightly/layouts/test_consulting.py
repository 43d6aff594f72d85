"""Frozen models, estimates and the critic over layouts: the same step as in one process.

Each axis does something else to decisions: `cp` slices them, `tp` splits the vocabulary, `pp` leaves them to the last
stage, `dp_shard` gives processes sequences of their own.
"""

import functools
from typing import ClassVar

import attrs
import pytest
import torch

from cosmos_core.config.job import Stage
from cosmos_core.config.schema import CriticConfig, MeshConfig, OptimizerConfig, ParallelConfig, PolicyConfig
from cosmos_core.policy.mesh.layout import layout_of
from cosmos_core.policy.mesh.mesh import form_mesh
from cosmos_core.policy.processes.group import solo
from cosmos_core.policy.processes.world import World, single_world
from cosmos_core.policy.training.critic import Critic
from cosmos_core.policy.training.frozen import FrozenModel
from cosmos_core.policy.training.metrics import Stopwatch
from cosmos_core.policy.training.trainer import Trainer
from cosmos_core.protocols import Aggregation, Loss, PlainAlgorithm
from cosmos_core.protocols.algorithm import Estimate
from cosmos_core.protocols.frozen import Divergence
from cosmos_core.testing.layouts import share_of, whole, worst_error
from cosmos_core.testing.worlds import run_world
from tests.families import CONFIGS, family, text_payloads

MESHES = (MeshConfig(dp_shard=2), MeshConfig(tp=2), MeshConfig(cp=2), MeshConfig(pp=2))


@attrs.frozen
class Everything(PlainAlgorithm):
    """A divergence from the teacher, log-probs of the reference, whitened advantages, and a critic."""

    aggregation = Aggregation.TOKEN_MEAN
    constant_length = 1
    old_logprobs = "recompute"
    needs_entropy = False
    skips_zero_advantage = False
    needs_critic = True
    consults: ClassVar = {"reference": None, "teacher": Divergence(kind="jsd", beta=0.3, top=5)}

    def admit(self, group):
        return None

    def advantages(self, groups):
        raise AssertionError

    def summarise(self, taken):
        return [float((taken.logprobs_n - taken.frozen_n["reference"]).sum()), float(taken.values_n.sum())]

    def settle(self, batch):
        total = sum(apart for apart, _ in batch.values())

        def estimate(taken):
            share = batch[taken.place][0] / total
            return Estimate(
                advantages_n=torch.full_like(taken.logprobs_n, share),
                targets_n=taken.values_n + taken.advantage,
                metrics={"share": share},
            )

        return estimate

    def loss(self, decisions):
        apart_N = decisions.logprobs_N - decisions.frozen["reference"].logprobs_N
        error_N = (decisions.values_N - decisions.targets_N).square()
        return Loss(
            loss_N=decisions.frozen["teacher"].divergence_N
            - decisions.advantages_N * decisions.logprobs_N
            + 0.1 * apart_N.square()
            + error_N
        )


def two_steps(world, mesh):
    policy = PolicyConfig(precision="fp32", micro_batch_units=64, mesh=mesh, parallel=ParallelConfig(compile="off"))
    device = torch.device("cpu")
    layout, model = layout_of(policy, world.mesh, "cpu"), family("hf", CONFIGS["qwen3"])()

    def build(seed):
        return model.build(seed=seed, dtype=torch.float32, device=device, layout=layout)

    frozen = {
        role: FrozenModel(
            role,
            model,
            functools.partial(build, seed),
            policy=policy,
            mesh=world.mesh,
            device=device,
            is_offloaded=True,
            follows=False,
        )
        for role, seed in (("reference", 5), ("teacher", 6))
    }
    critic = Critic(CriticConfig(lr=0.1), CONFIGS["qwen3"]["hidden_size"], device)
    trainer = Trainer(
        model=model, module=build(0), policy=policy, device=device, world=world, frozen=frozen, critic=critic
    )
    optimizer = OptimizerConfig(lr=1e-3, clip_norm=0.0)
    stage = Stage(
        index=0,
        key="algorithm",
        plugin="everything",
        options={},
        steps=9,
        prompts_per_step=1,
        optimizer=optimizer,
        first_step=0,
    )
    trainer.begin_stage(stage, Everything(), 1.0)
    share = share_of(text_payloads(), world)
    for _ in range(2):
        meter = trainer.train(share, share.counts, solo(), Stopwatch(device)).meter
    gradients = whole({name: p.grad for name, p in trainer.module.named_parameters() if p.grad is not None}, world)
    head = {name: tensor.clone() for name, tensor in trainer.state().items() if name.startswith("critic.")}
    return gradients, head, meter.maxima["grad_norm"]


def in_layouts():
    return [two_steps(World(form_mesh(mesh, "cpu")), mesh) for mesh in MESHES]


def test_a_step_is_that_of_one_process():
    alone = two_steps(single_world(), MeshConfig())
    for mesh, (gradients, head, norm) in zip(MESHES, run_world(2, in_layouts, timeout_s=240.0)[0], strict=True):
        name, error = worst_error(gradients, alone[0])
        assert error < 1e-4, f"{mesh}: {name}"
        assert norm == pytest.approx(alone[2], rel=1e-4), mesh
        for name, tensor in alone[1].items():
            torch.testing.assert_close(head[name], tensor, rtol=1e-4, atol=1e-5, msg=f"{mesh}: {name}")
