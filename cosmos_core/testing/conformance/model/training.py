"""Training through the core's own trainer, with the simplest of algorithms."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cosmos_core.config.schema import OptimizerConfig, PolicyConfig
from cosmos_core.config.stages import Stage
from cosmos_core.policy.batch import Counts, TrainSequence
from cosmos_core.policy.group import solo
from cosmos_core.policy.meter import Stopwatch
from cosmos_core.policy.trainer import Trainer
from cosmos_core.protocols import Aggregation, Decisions, Loss, Model, OldLogprobs
from cosmos_core.testing.conformance.model.evaluation import ROOM, pack_alone
from cosmos_core.types import Group, Payload


class Imitation:
    """Makes every decision likelier (see `cosmos_core.protocols.Algorithm`)."""

    aggregation: Aggregation = Aggregation.TOKEN_MEAN
    constant_length: int = 1
    old_logprobs: OldLogprobs = "none"
    needs_entropy: bool = False
    skips_zero_advantage: bool = False

    def admit(self, group: Group) -> str | None:  # noqa: ARG002
        """Take every group."""
        return None

    def advantages(self, groups: Sequence[Group]) -> list[list[float | None]]:
        """Value every sample alike."""
        return [[1.0] * len(group.samples) for group in groups]

    def loss(self, decisions: Decisions) -> Loss:
        """The negative log-probability."""
        return Loss(loss_N=-decisions.logprobs_N)


def imitate(model: Model, module: torch.nn.Module, payloads: Sequence[Payload], *, steps: int) -> list[float]:
    """Train a module on payloads, in place, in float32.

    Returns:
        The loss of each step, before it was applied.
    """
    policy = PolicyConfig(precision="fp32", micro_batch_units=ROOM)
    trainer = Trainer(model=model, module=module, policy=policy, device=torch.device("cpu"))
    trainer.begin_stage(_stage(steps), Imitation(), 1.0)
    sequences = [TrainSequence(payload=payload, advantage=1.0) for payload in payloads]
    totals = Counts(
        sequences=len(payloads),
        decisions=sum(pack_alone(model, payload).num_decisions[0] for payload in payloads),
        trained=len(payloads),
    )
    watch = Stopwatch(trainer.device)
    return [trainer.train(sequences, totals, solo(), watch).meter.report()["loss"] for _ in range(steps)]


def _stage(steps: int) -> Stage:
    return Stage(
        index=0,
        key="algorithm",
        plugin="imitation",
        options={},
        steps=steps,
        prompts_per_step=1,
        optimizer=OptimizerConfig(lr=3e-3),
        first_step=0,
    )
