"""One process's part of a training step: micro-batches forward and backward, gradients reduced, clipped, applied.

Shape legend: N decisions of a micro-batch.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Sequence

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
from cosmos_core.policy.training.execution import Executor, make_executor
from cosmos_core.policy.training.gradients import GradientBuffer
from cosmos_core.policy.training.measures import Measures
from cosmos_core.policy.training.meter import Meter, Stopwatch
from cosmos_core.policy.training.objective import Known, know, price
from cosmos_core.policy.training.optimizer import AdamW
from cosmos_core.policy.training.schedule import learning_rate
from cosmos_core.policy.training.tallies import Tallies
from cosmos_core.policy.training.ties import Ties
from cosmos_core.policy.training.vitals import watch_layers
from cosmos_core.protocols import Algorithm, Decided, MicroBatch, Model
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


@attrs.frozen(kw_only=True, eq=False)
class Prepared:
    """Micro-batches of a step whose decisions were taken at one temperature.

    Attributes:
        batches: As many as every other process of the replica has; those after `num_real` only keep step.
        known: What is known of the real ones before their forward, on the training device.
        weights: Weights of the decisions of the real ones, on the CPU.
        num_real: Those that count.
        temperature: At which their decisions were taken.
    """

    batches: Sequence[MicroBatch]
    known: Sequence[Known]
    weights: Sequence[torch.Tensor]
    num_real: int
    temperature: float


class Trainer:
    """The weights, their optimizer and where in the run they are.

    Args:
        model: Evaluates decisions.
        module: Its weights, in float32; trained in place.
        policy: Precision, budget and guards.
        device: Where the module is.
        world: The processes of this replica.

    Attributes:
        step: Global step whose weights these are; negative while they are a mixture of two (see `transfer`).
        stage: The stage whose optimizer this is.
        nonfinite_steps: Steps skipped in a row.
        num_units: Units that went forward and backward since the start of the process.
        activity: What the replica is doing; each forward of a layer counts as progress.
    """

    def __init__(
        self, *, model: Model, module: torch.nn.Module, policy: PolicyConfig, device: torch.device, world: World
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
        self.stage: Stage
        self._algorithm: Algorithm
        self._optimizer: AdamW
        self._temperature = 1.0
        self._policy = policy
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
        return tensors

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
        measures = Measures()
        with watch("forward_backward_s"), self._compute_precision():
            self._accumulate(parts, measures)
        with watch("reduce_s"):
            self._gradients.collect()
            self._ties.sum(self._gradients)
            if self.world.mesh.size("dp_replicate") > 1:
                # Once a step; FSDP would do so in each backward pass.
                self._gradients.sum(self.world.mesh.group("dp_replicate"))
            group.sum(self._gradients.flat)
            self._tallies.sum(group)
        with watch("optimizer_s"):
            return self._apply(measures.meter())

    def measure(self, share: Share) -> float:
        """Evaluate demonstrations without learning from them.

        Args:
            share: This process's sequences.

        Returns:
            Minus the sum of their decisions' log-probabilities; 0 where another process of the replica has them, too.
        """
        batches, num_real = self._pack(share, share.sequences)
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
        batches, num_real = self._pack(share, drawn)
        known = [know(self._algorithm, batch, drawn, totals) for batch in batches[:num_real]]
        return Prepared(
            batches=batches,
            known=[each.on(self.device) for each in known],
            weights=[each.weights_N for each in known],
            num_real=num_real,
            temperature=self._temperature if temperature is None else temperature,
        )

    def _pack(self, share: Share, chosen: Sequence[TrainSequence]) -> tuple[list[MicroBatch], int]:
        """Pack, and bring every process to the same number of micro-batches: they meet in each forward.

        Args:
            share: Of this process; whatever it has can keep step.
            chosen: The sequences of it to pack.

        Returns:
            The micro-batches, and how many of them, the first, are real.
        """
        mesh = self.world.mesh
        sequences = chosen or share.sequences[:1] or tuple(filter(None, [share.filler]))
        batches = self.model.pack(
            [sequence.payload for sequence in sequences],
            budget=self._policy.micro_batch_units,
            multiple=mesh.size("cp") * mesh.size("tp"),
            is_uniform=mesh.size("pp") > 1,
        )
        num_real = len(batches) if chosen else 0
        number = self.world.most(len(batches))
        if number > len(batches):
            batches += [min(batches, key=lambda batch: batch.num_units)] * (number - len(batches))
        return batches, num_real

    @property
    def _is_measured(self) -> bool:
        """Whether this process measures: of those that share sequences, and so their decisions, one does."""
        return self.world.mesh.place("cp") == 0 and self.world.mesh.place("tp") == 0

    def _accumulate(self, parts: Sequence[Prepared], measures: Measures) -> None:
        # Every old log-prob is taken before the first backward: they are of the step's starting weights.
        olds = [self._old_logprobs(prepared) for prepared in parts]
        for prepared, own in zip(parts, olds, strict=True):
            self._accumulate_part(prepared, own, measures)

    def _accumulate_part(self, prepared: Prepared, olds: Sequence[torch.Tensor | None], measures: Measures) -> None:
        weighed = [
            attrs.evolve(batch, weights_N=weights_N)
            for batch, weights_N in zip(prepared.batches, prepared.weights, strict=False)
        ]

        def loss(index: int, decided: Decided) -> torch.Tensor:
            if index >= prepared.num_real:
                return decided.logprobs_N.sum() * 0.0
            known = prepared.known[index]
            priced = price(self._algorithm, decided, known, olds[index])
            total = torch.dot(priced.loss_N, known.weights_N)
            if self._is_measured:
                measures.take(total.detach(), decided, priced, known, version=self.step)
            return total

        self._executor.train(
            [*weighed, *prepared.batches[prepared.num_real :]],
            temperature=prepared.temperature,
            with_entropy=self._algorithm.needs_entropy,
            loss=loss,
        )
        self.num_units += sum(batch.num_units for batch in prepared.batches[: prepared.num_real])

    def _old_logprobs(self, prepared: Prepared) -> Sequence[torch.Tensor | None]:
        match self._algorithm.old_logprobs:
            case "none":
                return [None] * prepared.num_real
            case "behaviour":
                return [known.behaviour_logprobs_N for known in prepared.known]
            case "recompute":
                decided = self._executor.evaluate(prepared.batches, temperature=prepared.temperature)
                return [None] * prepared.num_real if decided is None else [each.logprobs_N for each in decided]

    def _apply(self, meter: Meter) -> Applied:
        lr = learning_rate(self.stage.optimizer, step=self.step + 1 - self.stage.first_step, steps=self.stage.steps)
        norm = math.sqrt(float(self.world.sum(self._gradients.square())))
        is_finite = math.isfinite(norm)
        if is_finite:
            self._gradients.clip(norm, self.stage.optimizer.clip_norm)
            self._optimizer.step(lr, self.stage.optimizer.weight_decay)
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
