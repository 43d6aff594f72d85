"""Makes the trainer of a job, with the frozen models that its algorithm consults, and sets its stage and values."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Final

import attrs
import torch

from cosmos_core.config.job import Job, Stage, stages
from cosmos_core.config.loading import recipe_with
from cosmos_core.config.training import DTYPES
from cosmos_core.devices import choose_device
from cosmos_core.errors import CheckpointError, ConfigError
from cosmos_core.plugins.recipe import load_algorithm, load_model, source_of, unmet
from cosmos_core.plugins.selection import PluginSet
from cosmos_core.policy.mesh.layout import layout_of
from cosmos_core.policy.processes.world import World
from cosmos_core.policy.training.critic import Critic
from cosmos_core.policy.training.frozen import FrozenModel
from cosmos_core.policy.training.trainer import Trainer
from cosmos_core.protocols import Algorithm, Model
from cosmos_core.protocols.frozen import FrozenRole
from cosmos_core.types import Scalar
from cosmos_core.weights.shards import torch_dtype


def make_trainer(job: Job, model: Model, world: World, plugins: PluginSet) -> Trainer:
    """The initial weights of a job, ready to train, and those of the models that its algorithm consults."""
    policy = job.recipe.policy
    device = choose_device("policy.device", policy.device)
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
    device = choose_device("policy.device", policy.device)
    layout = layout_of(policy, world.mesh, device.type)
    follows = config.path is None
    is_offloaded = config.placement == "offloaded"
    model = load_model(job, plugins, role)
    layout = attrs.evolve(
        layout,
        # FSDP's; a module of one process is moved as a whole.
        cpu_offload=is_offloaded and device.type != "cpu" and world.size > 1,
        recompute="none",
        offload_activations=False,
        # What follows the policy has its adapters, too.
        lora=layout.lora if follows else None,
    )

    held = torch_dtype(DTYPES[config.held(policy.precision, on_gpu=device.type != "cpu")])

    def build() -> torch.nn.Module:
        return model.build(seed=job.recipe.run.seed, dtype=held, device=device, layout=layout)

    return FrozenModel(
        role, model, build, policy=policy, mesh=world.mesh, device=device, is_offloaded=is_offloaded, follows=follows
    )


_LOG: Final = logging.getLogger(__name__)


@attrs.define(eq=False)
class StageSettings:
    """Makes a trainer take up stages, and go by the values of each step's order.

    Attributes:
        job: The run; its recipe is as it was at first.
        plugins: Its plugins.
        trainer: The trainer.
    """

    _job: Job
    _plugins: PluginSet
    _trainer: Trainer
    _present: Job = attrs.field(default=attrs.Factory(lambda self: self._job, takes_self=True), init=False)
    _values: Mapping[str, Scalar] = attrs.field(factory=dict, init=False)

    def begin_stage(self, index: int) -> None:
        """Take up a stage.

        Raises:
            CheckpointError: The recipe has no such stage.
            ConfigError: The algorithm refuses its options, or the recipe lacks a model that it needs.
            PluginError: The algorithm failed.
        """
        known = stages(self._present.recipe)
        if index >= len(known):
            raise CheckpointError(
                f"a checkpoint of stage {index}, and the recipe has {len(known)}: it is another run's"
            )
        stage = known[index]
        is_rollouts = source_of(self._plugins, stage) == "rollouts"
        # Sequences that were drawn at another temperature than the recipe's say so themselves.
        temperature = self._job.recipe.rollout.sampling.temperature if is_rollouts else 1.0
        self._trainer.begin_stage(stage, self._algorithm(stage), temperature)

    def adopt(self, values: Mapping[str, Scalar]) -> None:
        """Go by these values from the next step on.

        Args:
            values: Of dynamic keys that are not as in the recipe.

        Raises:
            ConfigError: The algorithm refuses its options, or the recipe its values.
            PluginError: The algorithm failed.
        """
        if values == self._values:
            return
        recipe = recipe_with(self._job.recipe, values)
        self._present = attrs.evolve(self._job, recipe=recipe)
        stage = stages(recipe)[self._trainer.stage.index]
        self._trainer.change(stage, self._algorithm(stage))
        _LOG.info("from step %d on, other than the recipe: %s", self._trainer.step + 1, dict(values) or "nothing")
        self._values = dict(values)

    def _algorithm(self, stage: Stage) -> Algorithm:
        algorithm = load_algorithm(self._present, self._plugins, stage)
        if lacking := [*unmet(self._present.recipe, stage, algorithm)]:
            raise ConfigError("\n".join(lacking))
        return algorithm
