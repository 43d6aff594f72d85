"""Makes the trainer of a job: the policy's weights, and the frozen models that its algorithm consults."""

from __future__ import annotations

import attrs
import torch

from cosmos_core.config.job import Job
from cosmos_core.models.parallel.layout import layout_of
from cosmos_core.plugins.roles import load_frozen
from cosmos_core.plugins.selection import PluginSet
from cosmos_core.policy.device import choose_device
from cosmos_core.policy.processes.world import World
from cosmos_core.policy.training.critic import Critic
from cosmos_core.policy.training.frozen import FrozenModel
from cosmos_core.policy.training.trainer import Trainer
from cosmos_core.protocols import FrozenRole, Model


def make_trainer(job: Job, model: Model, world: World, plugins: PluginSet) -> Trainer:
    """The initial weights of a job, ready to train, and those of the models that its algorithm consults."""
    policy = job.recipe.policy
    device = choose_device(policy.device)
    layout = layout_of(policy, world.mesh, device.type)
    module = model.build(seed=job.recipe.run.seed, dtype=torch.float32, device=device, layout=layout)
    frozen = {role: make_frozen(job, role, world, plugins) for role in job.recipe.frozen}
    critic = None
    if job.recipe.critic is not None:
        critic = Critic(job.recipe.critic, model.facts().hidden_size, device)
    return Trainer(model=model, module=module, policy=policy, device=device, world=world, frozen=frozen, critic=critic)


def make_frozen(job: Job, role: FrozenRole, world: World, plugins: PluginSet) -> FrozenModel:
    """A model that the algorithm consults, spread over the policy's processes as the policy is."""
    policy, config = job.recipe.policy, job.recipe.frozen[role]
    device = choose_device(policy.device)
    layout = layout_of(policy, world.mesh, device.type)
    follows = config.path is None
    is_offloaded = config.placement == "offloaded"
    model = load_frozen(job, plugins, role)
    layout = attrs.evolve(
        layout,
        # FSDP's; a module of one process is moved as a whole.
        cpu_offload=is_offloaded and device.type != "cpu" and world.size > 1,
        recompute="none",
        # What follows the policy has its adapters, too.
        lora=layout.lora if follows else None,
    )

    def build() -> torch.nn.Module:
        return model.build(seed=job.recipe.run.seed, dtype=torch.float32, device=device, layout=layout)

    return FrozenModel(
        role,
        model,
        build,
        policy=policy,
        mesh=world.mesh,
        device=device,
        is_offloaded=is_offloaded,
        follows=follows,
    )
