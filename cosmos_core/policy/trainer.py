"""One replica's training step: micro-batches forward and backward, gradients reduced, clipped, applied.

Shape legend: N decisions of a micro-batch.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence

import attrs
import torch

from cosmos_core.config.schema import PolicyConfig
from cosmos_core.config.stages import Stage
from cosmos_core.errors import TrainingError
from cosmos_core.policy.batch import Counts, TrainSequence
from cosmos_core.policy.gradients import GradientBuffer
from cosmos_core.policy.group import GradientGroup
from cosmos_core.policy.measures import Measures
from cosmos_core.policy.meter import Meter, Stopwatch
from cosmos_core.policy.objective import Known, know, price
from cosmos_core.policy.optimizer import AdamW
from cosmos_core.policy.schedule import learning_rate
from cosmos_core.protocols import Algorithm, MicroBatch, Model
from cosmos_core.weights.shards import canonical_tensors


@attrs.frozen(kw_only=True)
class Applied:
    """What came of a step.

    Attributes:
        skipped: Whether the gradient was not finite, so that the weights stayed as they were.
        meter: This replica's part of the metrics.
    """

    skipped: bool
    meter: Meter


class Trainer:
    """The weights, their optimizer and where in the run they are.

    Args:
        model: Evaluates decisions.
        module: Its weights, in float32; trained in place.
        policy: Precision, budget and guards.
        device: Where the module is.

    Attributes:
        step: Global step whose weights these are; negative while they are a mixture of two (see `transfer`).
        stage: The stage whose optimizer this is.
        nonfinite_steps: Steps skipped in a row.
        num_units: Units that went forward and backward since the start of the process.
    """

    def __init__(self, *, model: Model, module: torch.nn.Module, policy: PolicyConfig, device: torch.device) -> None:
        self.model = model
        self.module = module
        self.device = device
        self.step = 0
        self.nonfinite_steps = 0
        self.num_units = 0
        self.stage: Stage
        self._algorithm: Algorithm
        self._optimizer: AdamW
        self._temperature = 1.0
        self._policy = policy
        self._gradients = GradientBuffer(module.parameters())
        if policy.parallel.recompute == "full":
            _recompute_activations(module)

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
            temperature: At which its decisions were taken (1 for demonstrations).
        """
        self.stage = stage
        self._temperature = temperature
        self._algorithm = algorithm
        self._optimizer = AdamW(self.module, stage.optimizer)

    def state(self) -> dict[str, torch.Tensor]:
        """Every tensor that training goes on from, by flat name, in a fixed order; no copies."""
        tensors = {f"model.{name}": tensor for name, tensor in canonical_tensors(self.module).items()}
        tensors.update({f"optimizer.{name}": tensor for name, tensor in self._optimizer.state().items()})
        return tensors

    def train(
        self, sequences: Sequence[TrainSequence], totals: Counts, group: GradientGroup, watch: Stopwatch
    ) -> Applied:
        """Apply one optimizer step.

        Args:
            sequences: This replica's share.
            totals: Counts of the whole batch, all replicas.
            group: Those that train the same step.
            watch: Takes the times.

        Raises:
            GradientGroupError: The group broke; nothing was applied.
            TrainingError: Too many steps in a row had a gradient that is not finite.
        """
        with watch("pack_s"):
            payloads = [sequence.payload for sequence in sequences]
            batches = self.model.pack(payloads, budget=self._policy.micro_batch_units)
        # Whatever a step that broke off left behind is forgotten here.
        self._gradients.zero()
        measures = Measures()
        with watch("forward_backward_s"):
            prepared = [(batch, know(self._algorithm, batch, sequences, totals, self.device)) for batch in batches]
            # Every old log-prob is taken before the first backward: they are of the step's starting weights.
            olds = [self._old_logprobs(batch, known) for batch, known in prepared]
            for (batch, known), old_logprobs_N in zip(prepared, olds, strict=True):
                self._accumulate(batch, known, old_logprobs_N, measures)
        with watch("reduce_s"):
            group.sum(self._gradients.flat)
        with watch("optimizer_s"):
            return self._apply(measures.meter())

    def _apply(self, meter: Meter) -> Applied:
        lr = learning_rate(self.stage.optimizer, step=self.step + 1 - self.stage.first_step, steps=self.stage.steps)
        norm = self._gradients.norm()
        is_finite = math.isfinite(norm)
        if is_finite:
            self._gradients.clip(norm, self.stage.optimizer.clip_norm)
            self._optimizer.step(lr)
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

    def _accumulate(
        self, batch: MicroBatch, known: Known, old_logprobs_N: torch.Tensor | None, measures: Measures
    ) -> None:
        with self._compute_precision():
            decided = self.model.decide(
                self.module, batch, temperature=self._temperature, with_entropy=self._algorithm.needs_entropy
            )
        loss = price(self._algorithm, decided, known, old_logprobs_N)
        total = torch.dot(loss.loss_N, known.weights_N)
        total.backward()  # type: ignore[no-untyped-call]
        self.num_units += batch.num_units
        measures.take(total.detach(), decided, loss, known, version=self.step)

    def _old_logprobs(self, batch: MicroBatch, known: Known) -> torch.Tensor | None:
        match self._algorithm.old_logprobs:
            case "none":
                return None
            case "behaviour":
                return known.behaviour_logprobs_N
            case "recompute":
                with torch.no_grad(), self._compute_precision():
                    return self.model.decide(self.module, batch, temperature=self._temperature).logprobs_N

    def _compute_precision(self) -> contextlib.AbstractContextManager[object]:
        if self._policy.precision == "fp32":
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16)


def _recompute_activations(module: torch.nn.Module) -> None:
    """Turn checkpointing on; it needs training mode, and dropout would make log-probs incomparable."""
    module.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    module.train()
    for layer in module.modules():
        if isinstance(layer, torch.nn.Dropout):
            layer.p = 0.0
