"""Training through the core's own trainer, with the simplest of algorithms."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cosmos_core.config.schema import OptimizerConfig, PolicyConfig
from cosmos_core.config.stages import Stage
from cosmos_core.policy.batches.batch import Counts, Share, TrainSequence
from cosmos_core.policy.processes.group import solo
from cosmos_core.policy.processes.world import single_world
from cosmos_core.policy.training.metrics import Stopwatch
from cosmos_core.policy.training.trainer import Trainer
from cosmos_core.protocols import Model
from cosmos_core.testing.conformance.model.evaluation import ROOM, pack_alone
from cosmos_core.testing.layouts import Imitation
from cosmos_core.types import Payload


def imitate(model: Model, module: torch.nn.Module, payloads: Sequence[Payload], *, steps: int) -> list[float]:
    """Train a module on payloads, in place, in float32.

    Returns:
        The loss of each step, before it was applied.
    """
    policy = PolicyConfig(precision="fp32", micro_batch_units=ROOM)
    trainer = Trainer(model=model, module=module, policy=policy, device=torch.device("cpu"), world=single_world())
    trainer.begin_stage(_stage(steps), Imitation(), 1.0)
    sequences = tuple(TrainSequence(payload=payload, advantage=1.0) for payload in payloads)
    totals = Counts(
        sequences=len(payloads),
        decisions=sum(pack_alone(model, payload).num_decisions[0] for payload in payloads),
        trained=len(payloads),
    )
    watch = Stopwatch(trainer.device)
    share = Share(sequences=sequences, counts=totals)
    return [trainer.train(share, totals, solo(), watch).meter.report()["loss"] for _ in range(steps)]


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
