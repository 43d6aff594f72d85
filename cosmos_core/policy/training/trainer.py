"""One process's part of a training step: micro-batches forward and backward, gradients reduced, clipped, applied.

Shape legend: N decisions of a micro-batch.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final, TypedDict

import attrs
import torch

from cosmos_core.config.schema import PolicyConfig
from cosmos_core.config.stages import Stage
from cosmos_core.errors import TrainingError
from cosmos_core.policy.adapters.below import frozen_digest
from cosmos_core.policy.adapters.beside import trained_tensors
from cosmos_core.policy.batches.batch import Counts, Share, TrainSequence
from cosmos_core.policy.processes.group import GradientGroup
from cosmos_core.policy.processes.world import World
from cosmos_core.policy.training.beforehand import Beforehand, Prepared, divergence_of, settled
from cosmos_core.policy.training.critic import Critic
from cosmos_core.policy.training.execution import Executor, make_executor
from cosmos_core.policy.training.frozen import FrozenModel
from cosmos_core.policy.training.gradients import GradientBuffer
from cosmos_core.policy.training.measures import Measures
from cosmos_core.policy.training.meter import Meter, Stopwatch
from cosmos_core.policy.training.objective import know, price
from cosmos_core.policy.training.optimizer import AdamW
from cosmos_core.policy.training.schedule import learning_rate
from cosmos_core.policy.training.tallies import Tallies
from cosmos_core.policy.training.ties import Ties
from cosmos_core.policy.training.vitals import watch_layers
from cosmos_core.protocols import Algorithm, Consulting, Decided, Estimating, FrozenRole, MicroBatch, Model, Valuing
from cosmos_core.replica.activity import Activity


@attrs.frozen(kw_only=True)
class Applied:
    """What came of a step.

    Attributes:
        skipped: Whether the gradient was not finite, so that the weights stayed as they were.
        meter: This process's part of the metrics.
    """

    skipped: bool
    meter: Meter


class _Packing(TypedDict):
    """How micro-batches are packed (see `Model.pack`)."""

    budget: int
    multiple: int
    is_uniform: bool


class Trainer:
    """The weights, their optimizer and where in the run they are.

    Args:
        model: Evaluates decisions.
        module: Its weights, in float32; trained in place.
        policy: Precision, budget and guards.
        device: Where the module is.
        world: The processes of this replica.
        frozen: Models that an algorithm may consult, by role.
        critic: Estimates returns; None without one.

    Attributes:
        step: Global step whose weights these are; negative while they are a mixture of two (see `transfer`).
        stage: The stage whose optimizer this is.
        nonfinite_steps: Steps skipped in a row.
        num_units: Units that went forward and backward since the start of the process.
        activity: What the replica is doing; each forward of a layer counts as progress.
    """

    def __init__(
        self,
        *,
        model: Model,
        module: torch.nn.Module,
        policy: PolicyConfig,
        device: torch.device,
        world: World,
        frozen: Mapping[FrozenRole, FrozenModel] = MappingProxyType({}),
        critic: Critic | None = None,
    ) -> None:
        self.model = model
        self.module = module
        self.device = device
        self.world = world
        self.step = 0
        self.nonfinite_steps = 0
        self.num_units = 0
        self.activity = Activity()
        watch_layers(module, self.activity)
        for each in frozen.values():
            each.watch(self.activity)
        self.stage: Stage
        self._algorithm: Algorithm
        self._optimizer: AdamW
        self._temperature = 1.0
        self._policy = policy
        self._frozen: Final = frozen
        self._critic: Final = critic
        self._executor: Executor = make_executor(model, module, world.mesh, policy.parallel.schedule)
        self._ties = Ties.of(module, world)
        self._tallies = Tallies(model, module, world.mesh, device)
        self._gradients = GradientBuffer(
            dict(module.named_parameters()),
            processes=world.size // world.mesh.size("pp"),
            twice=tuple(self._ties.partners),
        )

    @property
    def state_device(self) -> torch.device:
        """Where weights, gradients and optimizer are: in the CPU's memory if they are kept there between uses."""
        return self._gradients.flat.device

    @property
    def optimizer(self) -> AdamW:
        """The present stage's optimizer."""
        return self._optimizer

    @property
    def algorithm(self) -> Algorithm:
        """The present stage's algorithm."""
        return self._algorithm

    def begin_stage(self, stage: Stage, algorithm: Algorithm, temperature: float) -> None:
        """Take up a stage with a fresh optimizer.

        Args:
            stage: The stage.
            algorithm: Its algorithm.
            temperature: At which its decisions were taken (1 for demonstrations), where a sequence does not say.
        """
        self.stage = stage
        self._temperature = temperature
        self._algorithm = algorithm
        self._optimizer = AdamW(self.module, stage.optimizer)
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
        self._algorithm = algorithm

    def state(self) -> dict[str, torch.Tensor]:
        """Every tensor that training goes on from, by flat name, in a fixed order; no copies."""
        tensors = {f"model.{name}": tensor for name, tensor in trained_tensors(self.module).items()}
        tensors.update({f"optimizer.{name}": tensor for name, tensor in self._optimizer.state().items()})
        for role, frozen in self._followers.items():
            tensors.update({f"{role}.{name}": tensor for name, tensor in frozen.state().items()})
        if self._critic is not None:
            tensors.update({f"critic.{name}": tensor for name, tensor in self._critic.state().items()})
        return tensors

    @property
    def _followers(self) -> Mapping[FrozenRole, FrozenModel]:
        """Frozen models whose weights no recipe names: a stage before has trained them."""
        if self.stage.first_step == 0:
            return {}
        return {role: frozen for role, frozen in self._frozen.items() if frozen.follows}

    @functools.cached_property
    def below(self) -> str:
        """Digest of the frozen weights below adapters; empty without any. All processes ask for it together."""
        if self._policy.lora is None:
            return ""
        return frozen_digest(self.module, self.world.rank, self.world.exchange)

    def train(self, share: Share, totals: Counts, group: GradientGroup, watch: Stopwatch) -> Applied:
        """Apply one optimizer step.

        Args:
            share: This process's sequences.
            totals: Counts of the whole batch, all replicas.
            group: Those that train the same step.
            watch: Takes the times.

        Raises:
            GradientGroupError: The group broke; nothing was applied.
            TrainingError: Too many steps in a row had a gradient that is not finite.
        """
        with watch("pack_s"):
            parts = self._prepare(share, totals)
        # Whatever a step that broke off left behind is forgotten here.
        self._gradients.zero()
        self._tallies.zero()
        critic = self._asked_critic
        if critic is not None:
            critic.zero()
        measures = Measures()
        with watch("beforehand_s"), self._compute_precision():
            known = self._know(parts, group, measures)
        with watch("forward_backward_s"), self._compute_precision():
            for prepared, before in known:
                self._accumulate(prepared, before, measures)
        with watch("reduce_s"):
            self._gradients.collect()
            self._ties.sum(self._gradients)
            if self.world.mesh.size("dp_replicate") > 1:
                # Once a step; FSDP would do so in each backward pass.
                self._gradients.sum(self.world.mesh.group("dp_replicate"))
            group.sum(self._gradients.flat)
            self._tallies.sum(group)
            critic_norm = 0.0
            if critic is not None:
                critic_norm = critic.reduce(self.world, group, counts=self._is_measured)
        with watch("optimizer_s"):
            return self._apply(measures.meter(), critic_norm)

    def measure(self, share: Share) -> float:
        """Evaluate demonstrations without learning from them.

        Args:
            share: This process's sequences.

        Returns:
            Minus the sum of their decisions' log-probabilities; 0 where another process of the replica has them, too.
        """
        batches, _, num_real = self._pack(share, share.sequences)
        if not batches:
            return 0.0
        with self._compute_precision():
            decided = self._executor.evaluate(batches, temperature=1.0)
        if decided is None or not self._is_measured:
            return 0.0
        return -sum(float(each.logprobs_N.double().sum()) for each in decided[:num_real])

    def _prepare(self, share: Share, totals: Counts) -> list[Prepared]:
        """What was drawn at one temperature goes through the model apart from the rest, on every process."""
        assert {sequence.temperature for sequence in share.sequences} <= {*share.temperatures}, "one would be left out"
        return [self._prepared(share, totals, temperature) for temperature in share.temperatures]

    def _prepared(self, share: Share, totals: Counts, temperature: float | None) -> Prepared:
        drawn = tuple(sequence for sequence in share.sequences if sequence.temperature == temperature)
        batches, packed, num_real = self._pack(share, drawn)
        known = [know(self._algorithm, batch, drawn, totals) for batch in batches[:num_real]]
        return Prepared(
            batches=batches,
            sequences=packed,
            known=[each.on(self.device) for each in known],
            weights=[each.weights_N for each in known],
            num_real=num_real,
            temperature=self._temperature if temperature is None else temperature,
        )

    def _pack(
        self, share: Share, chosen: Sequence[TrainSequence]
    ) -> tuple[list[MicroBatch], Sequence[TrainSequence], int]:
        """Pack, and bring every process to the same number of micro-batches: they meet in each forward.

        Args:
            share: Of this process; whatever it has can keep step.
            chosen: The sequences of it to pack.

        Returns:
            The micro-batches, the sequences in them, and how many of them, the first, are real.
        """
        sequences = chosen or share.sequences[:1] or tuple(filter(None, [share.filler]))
        batches = self.model.pack([sequence.payload for sequence in sequences], **self._packing)
        num_real = len(batches) if chosen else 0
        number = self.world.most(len(batches))
        if number > len(batches):
            batches += [min(batches, key=lambda batch: batch.num_units)] * (number - len(batches))
        return batches, sequences, num_real

    @functools.cached_property
    def _packing(self) -> _Packing:
        mesh = self.world.mesh
        return _Packing(
            budget=self._policy.micro_batch_units,
            multiple=mesh.size("cp") * mesh.size("tp"),
            is_uniform=mesh.size("pp") > 1,
        )

    @property
    def _asked_critic(self) -> Critic | None:
        """The critic, where the algorithm needs it."""
        is_asked = isinstance(self._algorithm, Valuing) and self._algorithm.needs_critic
        return self._critic if is_asked else None

    @property
    def _is_measured(self) -> bool:
        """Whether this process measures: of those that share sequences, and so their decisions, one does."""
        return self.world.mesh.place("cp") == 0 and self.world.mesh.place("tp") == 0

    def _know(
        self, parts: Sequence[Prepared], group: GradientGroup, measures: Measures
    ) -> list[tuple[Prepared, Beforehand]]:
        """Evaluate what must be known of the whole batch before the first backward changes anything."""
        known = [(prepared, self._beforehand(prepared)) for prepared in parts]
        if not isinstance(self._algorithm, Estimating):
            return known
        settling = settled(self._algorithm, known, self.world, group)
        done = []
        for (prepared, before), estimates in zip(known, settling, strict=True):
            if self._is_measured:
                for each in estimates:
                    measures.take_estimates(each)
            pairs = zip(prepared.known, estimates, strict=True) if before.is_here else ()
            done.append((attrs.evolve(prepared, known=[one.settled(each) for one, each in pairs]), before))
        return done

    def _beforehand(self, prepared: Prepared) -> Beforehand:
        algorithm, asked = self._algorithm, divergence_of(self._algorithm)
        consulted = algorithm.consults if isinstance(algorithm, Consulting) else ()
        payloads = [sequence.payload for sequence in prepared.sequences]
        frozen = {
            role: self._frozen[role].evaluate(
                prepared.batches,
                payloads,
                **self._packing,
                temperature=prepared.temperature,
                outlook=asked[1] if asked is not None and asked[0] == role else None,
            )
            for role in consulted
        }
        old: list[Decided] | None = []
        critic = self._asked_critic
        if algorithm.old_logprobs == "recompute" or critic is not None:
            old = self._executor.evaluate(
                prepared.batches,
                temperature=prepared.temperature,
                with_features=critic is not None,
                judge=None if critic is None else critic.judge,
            )
        if not self._executor.concludes:
            return Beforehand(is_here=False)
        assert old is not None, "the last stage is here"
        looks = {role: looks for role, looks in frozen.items() if looks is not None}
        return Beforehand(old=old, frozen=looks, diverges=asked)

    def _accumulate(self, prepared: Prepared, before: Beforehand, measures: Measures) -> None:
        weighed = [
            attrs.evolve(batch, weights_N=weights_N)
            for batch, weights_N in zip(prepared.batches, prepared.weights, strict=False)
        ]
        critic = self._asked_critic

        def loss(index: int, decided: Decided) -> torch.Tensor:
            if index >= prepared.num_real:
                return decided.logprobs_N.sum() * 0.0
            known = prepared.known[index]
            decided = decided if critic is None else critic.judge(decided)
            old_N = before.old_logprobs(self._algorithm, known, index)
            priced = price(self._algorithm, decided, known, old_N, before.opinions(index, decided))
            total = torch.dot(priced.loss_N, known.weights_N)
            if self._is_measured:
                measures.take(total.detach(), decided, priced, known, version=self.step)
            return total

        self._executor.train(
            [*weighed, *prepared.batches[prepared.num_real :]],
            temperature=prepared.temperature,
            with_entropy=self._algorithm.needs_entropy,
            loss=loss,
            against=before.against(),
            with_features=critic is not None,
        )
        self.num_units += sum(batch.num_units for batch in prepared.batches[: prepared.num_real])

    def _apply(self, meter: Meter, critic_norm: float = 0.0) -> Applied:
        lr = learning_rate(self.stage.optimizer, step=self.step + 1 - self.stage.first_step, steps=self.stage.steps)
        norm = math.sqrt(float(self.world.sum(self._gradients.square())))
        is_finite = math.isfinite(norm) and math.isfinite(critic_norm)
        if is_finite:
            self._gradients.clip(norm, self.stage.optimizer.clip_norm)
            self._optimizer.step(lr, self.stage.optimizer.weight_decay)
            critic = self._asked_critic
            if critic is not None:
                critic.step(critic_norm, self.stage.optimizer.clip_norm)
                meter.peak("critic_grad_norm", critic_norm)
            for name, value in self._tallies.act().items():
                meter.peak(name, value)
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
