"""One process's part of training: the weights, their optimizer, and steps whose gradients are reduced and applied."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Final

import attrs
import torch
from torch.distributed.fsdp import FSDPModule

from cosmos_core.config.job import Stage
from cosmos_core.config.schema import PolicyConfig
from cosmos_core.errors import TrainingError
from cosmos_core.models.parallel.lora import trained_tensors
from cosmos_core.policy.batches.batch import Counts, Share
from cosmos_core.policy.checkpoints.frozen_digest import frozen_digest
from cosmos_core.policy.mesh.pipeline import Forward
from cosmos_core.policy.processes.group import GradientGroup
from cosmos_core.policy.processes.world import World
from cosmos_core.policy.training.average import AVERAGE, Average
from cosmos_core.policy.training.critic import Critic
from cosmos_core.policy.training.executor import Executor, make_executor, watch_layers
from cosmos_core.policy.training.frozen import FrozenModel
from cosmos_core.policy.training.gradients import GradientBuffer, TiedParameters
from cosmos_core.policy.training.metrics import IMITATION, Counters, Measures, Meter, Stopwatch
from cosmos_core.policy.training.microbatch import Packer
from cosmos_core.policy.training.optimizers import Optimizer, learning_rate
from cosmos_core.policy.training.passes import Passes, is_measured
from cosmos_core.policy.training.ratios import Ratios
from cosmos_core.protocols import Algorithm, Model
from cosmos_core.protocols.frozen import FrozenRole
from cosmos_core.replica.activity import Activity
from cosmos_core.weights.staging import settle
from cosmos_core.weights.storages import Sleeper, Storages

MOST_UNIMITATED: Final = 10
"""Steps in a row that may lack every demonstration beside their rollouts."""


@attrs.frozen(kw_only=True)
class Applied:
    """The outcome of a step.

    Attributes:
        skipped: Whether the gradient was not finite, so that the weights stayed as they were.
        meter: This process's part of the metrics.
        ratios: The policy's probabilities divided by the engine's, for the sequences of this process.
    """

    skipped: bool
    meter: Meter
    ratios: Ratios = attrs.field(factory=Ratios)


@attrs.define(kw_only=True, eq=False, slots=False)
class Trainer:
    """The weights, their optimizer and where in the run they are.

    Attributes:
        model: Evaluates decisions.
        module: Its weights, in float32; trained in place.
        policy: Precision, budget and guards.
        device: Where the module is.
        world: The processes of this replica.
        frozen: Models that an algorithm may consult, by role.
        critic: Estimates returns; None without one.
        step: Global step whose weights these are; negative while they are a mixture of two (see `transfer`).
        stage: The present stage.
        algorithm: Of the stage.
        optimizer: Of the stage.
        nonfinite_steps: Steps skipped in a row.
        unimitated_steps: Steps in a row in which no demonstration could be read of those that are to be imitated.
        num_units: Units that went forward and backward since the start of the process.
        used: The use of its device by this process in the last step, by name (`replica.utilisation`).
        activity: What the replica is doing; each forward of a layer counts as progress.
    """

    model: Model
    module: torch.nn.Module
    _policy: PolicyConfig
    device: torch.device
    world: World
    _frozen: Mapping[FrozenRole, FrozenModel] = attrs.field(factory=dict)
    _critic: Critic | None = None

    def __attrs_post_init__(self) -> None:
        module, policy, world = self.module, self._policy, self.world
        self.step = 0
        self.nonfinite_steps = 0
        self.unimitated_steps = 0
        self.num_units = 0
        self.used: Mapping[str, float] = {}
        self.activity = Activity()
        watch_layers(module, self.activity)
        for each in self._frozen.values():
            each.watch(self.activity)
        self.stage: Stage
        self.algorithm: Algorithm
        self.optimizer: Optimizer
        self._temperature = 1.0
        self._packer = Packer(model=self.model, policy=policy, world=world, device=self.device)
        self._average = None if policy.average is None else Average(policy.average, module)
        self._executor: Executor = make_executor(self.model, module, world.mesh, policy.parallel.schedule)
        self._tied = TiedParameters(module, world)
        self._counters = Counters(self.model, module, world.mesh, self.device)
        self._gradients = GradientBuffer(
            dict(module.named_parameters()),
            processes=world.size // world.mesh.size("pp"),
            twice=tuple(self._tied.partners),
        )

    @property
    def state_device(self) -> torch.device:
        """The device of weights, gradients and optimizer: the CPU if they are kept there between uses."""
        return self._gradients.flat.device

    def begin_stage(self, stage: Stage, algorithm: Algorithm, temperature: float) -> None:
        """Take up a stage with a fresh optimizer.

        Args:
            stage: The stage.
            algorithm: Its algorithm.
            temperature: At which its decisions were taken (1 for demonstrations), where a sequence does not say.
        """
        settle()
        self.stage = stage
        self._temperature = temperature
        self.algorithm = algorithm
        self.optimizer = Optimizer(self.module, stage.optimizer)
        for frozen in self._frozen.values():
            if not frozen.follows:
                continue
            if stage.first_step == 0:
                # A run may go back to its first stage, whose checkpoints have no reference.
                frozen.begin_again()
            else:
                frozen.take_over(self.module)
        if self._critic is not None:
            self._critic.begin_stage(stage.optimizer)

    def change(self, stage: Stage, algorithm: Algorithm) -> None:
        """Go by other values of dynamic keys from now on; weights and optimizer state stay.

        Args:
            stage: The present stage as it is now.
            algorithm: Its algorithm, made anew.
        """
        assert stage.index == self.stage.index, "a stage is begun, not changed into"
        self.stage = stage
        self.algorithm = algorithm

    def state(self) -> dict[str, torch.Tensor]:
        """Every tensor that training goes on from, by flat name, in a fixed order; no copies."""
        tensors = {f"model.{name}": tensor for name, tensor in trained_tensors(self.module).items()}
        tensors.update({f"optimizer.{name}": tensor for name, tensor in self.optimizer.state().items()})
        # Frozen models whose weights no recipe names have those that a stage before has trained.
        follow = {role: frozen for role, frozen in self._frozen.items() if frozen.follows and self.stage.first_step}
        for role, frozen in follow.items():
            tensors.update({f"{role}.{name}": tensor for name, tensor in frozen.state().items()})
        if self._critic is not None:
            tensors.update({f"critic.{name}": tensor for name, tensor in self._critic.state().items()})
        if self._average is not None:
            tensors.update({f"{AVERAGE}.{name}": tensor for name, tensor in self._average.tensors.items()})
        return tensors

    def sleep(self, sleeper: Sleeper) -> None:
        """Give the memory of the device up; all of it comes back when the sleeper wakes, but for gradients."""
        settle()
        held = [*self.module.parameters(), *self.module.buffers(), *self.optimizer.held()]
        for frozen in self._frozen.values():
            held += frozen.held()
        held += [] if self._critic is None else self._critic.held()
        held += [] if self._average is None else self._average.tensors.values()
        for part in self.module.modules():
            if isinstance(part, FSDPModule):
                part.reshard()
        # They are zeroed before each step.
        sleeper.sleep(Storages(held, self.device), Storages([self._gradients.flat], self.device))

    def published(self) -> contextlib.AbstractContextManager[object]:
        """With what rollout replicas get in the module: the average of the weights, where the recipe says so."""
        average = self._policy.average
        if self._average is None or average is None or not average.publish:
            return contextlib.nullcontext()
        return self._average.in_place()

    @functools.cached_property
    def below(self) -> str:
        """Digest of the frozen weights below adapters; empty without any. All processes ask for it together."""
        if self._policy.lora is None:
            return ""
        return frozen_digest(self.module, self.world.rank, self.world.exchange)

    def train(
        self, share: Share, totals: Counts, group: GradientGroup, watch: Stopwatch, imitated: Counts | None = None
    ) -> Applied:
        """Apply one optimizer step.

        Args:
            share: This process's sequences.
            totals: Counts of the whole batch, all replicas.
            group: Those that train the same step.
            watch: Takes the times.
            imitated: Counts of all demonstrations that are imitated beside rollouts, where some are.

        Raises:
            GradientGroupError: The group broke; nothing was applied.
            TrainingError: Too many steps in a row had a gradient that is not finite, or nothing to imitate.
        """
        passes = self._passes
        with watch("pack_s"):
            parts = passes.prepare(share, totals)
            beside = passes.beside(share, imitated)
        # Whatever a step that broke off left behind is forgotten here.
        self._gradients.zero()
        self._counters.zero()
        critic = passes.critic
        if critic is not None:
            critic.zero()
        measures, imitation = Measures(), Measures(prefix=IMITATION)
        with watch("old_logprobs_s"), self._compute_precision():
            evaluated = passes.evaluate(parts, group, measures)
        with watch("forward_backward_s"), self._compute_precision():
            for part in evaluated:
                passes.accumulate(part, measures)
                self.num_units += part.prepared.num_units
            if beside is not None:
                passes.imitate(beside, imitation)
                self.num_units += beside.num_units
        with watch("reduce_s"):
            self._gradients.collect()
            self._tied.sum(self._gradients)
            if self.world.mesh.size("dp_replicate") > 1:
                # Once a step; FSDP would do so in each backward pass.
                self._gradients.sum(self.world.mesh.group("dp_replicate"))
            group.sum(self._gradients.flat)
            self._counters.sum(group)
            critic_norm = 0.0
            if critic is not None:
                critic_norm = critic.reduce(self.world, group, counts=is_measured(self.world))
        with watch("optimizer_s"):
            meter = measures.meter()
            meter.merge(imitation.meter())
            applied = self._apply(meter, critic_norm)
        self._expect_demonstrations(imitated)
        return attrs.evolve(applied, ratios=passes.ratios)

    def flops(self, lengths: Sequence[int], decisions: int) -> float:
        """Operations of a step of sequences of these lengths; 0 where the model does not tell its matrices."""
        facts = self.model.facts()
        return facts.training_flops(lengths, decisions, adapts=self._policy.lora is not None)

    def measure(self, share: Share) -> float:
        """Evaluate demonstrations without learning from them, under the weights that are published.

        Args:
            share: This process's sequences.

        Returns:
            Minus the sum of their decisions' log-probabilities; 0 where another process of the replica has them, too.
        """
        batches, _, num_real = self._packer.pack(share, share.sequences)
        if not batches:
            return 0.0
        with self.published(), self._compute_precision():
            decided = self._executor.evaluate(batches, Forward(temperature=1.0))
        if decided is None or not is_measured(self.world):
            return 0.0
        return -sum(float(each.logprobs_N.double().sum()) for each in decided[:num_real])

    def _expect_demonstrations(self, imitated: Counts | None) -> None:
        if imitated is None or imitated.sequences > 0:
            self.unimitated_steps = 0
            return
        self.unimitated_steps += 1
        if self.unimitated_steps > MOST_UNIMITATED:
            raise TrainingError(
                f"step {self.step}: {self.unimitated_steps} steps in a row had no demonstration that could be read, "
                "and the algorithm imitates some beside rollouts; the log says why each was refused: mend the rows, or "
                "set algorithm.options that imitate none"
            )

    @property
    def _passes(self) -> Passes:
        average = self._policy.average
        return Passes(
            algorithm=self.algorithm,
            executor=self._executor,
            packer=self._packer,
            world=self.world,
            frozen=self._frozen,
            average=self._average,
            critic=self._asked_critic,
            temperature=self._temperature,
            # Where the average is published, rollout replicas have other weights at each version.
            version=None if average is not None and average.publish else self.step,
        )

    @property
    def _asked_critic(self) -> Critic | None:
        """The critic, where the algorithm needs it."""
        return self._critic if self.algorithm.needs_critic else None

    def _apply(self, meter: Meter, critic_norm: float = 0.0) -> Applied:
        lr = learning_rate(self.stage.optimizer, step=self.step + 1 - self.stage.first_step, steps=self.stage.steps)
        norm = math.sqrt(float(self.world.sum(self._gradients.square())))
        is_finite = math.isfinite(norm) and math.isfinite(critic_norm)
        # What was published or is saved may still be read.
        settle()
        if is_finite:
            self._gradients.clip(norm, self.stage.optimizer.clip_norm)
            self.optimizer.step(lr, self.stage.optimizer.weight_decay)
            critic = self._asked_critic
            if critic is not None:
                critic.step(critic_norm, self.stage.optimizer.clip_norm)
                meter.peak("critic_grad_norm", critic_norm)
            for name, value in self._counters.act().items():
                meter.peak(name, value)
            if self._average is not None:
                self._average.follow(self.step + 1 - self.stage.first_step)
            self.nonfinite_steps = 0
        else:
            self.nonfinite_steps += 1
        self.step += 1
        if self.nonfinite_steps > self._policy.max_nonfinite_steps:
            raise TrainingError(
                f"step {self.step}: the gradient is not finite for {self.nonfinite_steps} steps in a row "
                f"(policy.max_nonfinite_steps = {self._policy.max_nonfinite_steps}); lower the learning rate, or "
                "look at the batch's log-probs"
            )
        meter.peak("grad_norm", norm)
        meter.peak("lr", lr)
        return Applied(skipped=not is_finite, meter=meter)

    def _compute_precision(self) -> contextlib.AbstractContextManager[object]:
        """Autocast in a replica of one process; elsewhere FSDP casts the weights it gathers."""
        if self._policy.precision == "fp32" or self.world.size > 1:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16)
