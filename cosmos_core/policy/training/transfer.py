"""Bringing a group's members to one state: the source's weights, optimizer and place in the run."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Final

from cosmos_core.policy.processes.group import GradientGroup
from cosmos_core.policy.training.gradients import local
from cosmos_core.policy.training.trainer import Trainer

UNKNOWN_STEP: Final = -1
"""Step of a trainer whose state is a mixture: it takes part in no training until it was overwritten as a whole."""


def transfer_state(trainer: Trainer, group: GradientGroup, source: int, begin_stage: Callable[[int], None]) -> None:
    """Copy the state of member `source` to all others, each process from the one of its rank.

    Args:
        trainer: This member's.
        group: The members.
        source: Rank of the one whose state all take.
        begin_stage: Makes the trainer take up a stage, by index.

    Raises:
        GradientGroupError: The group broke. The state of a member that is not the source may then be partial: its
            step is `UNKNOWN_STEP`, so that it can only go on from a next transfer.
    """
    place = [trainer.step, trainer.stage.index, trainer.nonfinite_steps, trainer.unimitated_steps]
    step, stage, nonfinite_steps, unimitated_steps = json.loads(group.exchange(json.dumps(place).encode())[source])
    if group.rank != source:
        trainer.step = UNKNOWN_STEP
    if stage != trainer.stage.index:
        begin_stage(stage)
    group.copy([local(tensor) for tensor in trainer.state().values()], source)
    trainer.step = step
    trainer.nonfinite_steps = nonfinite_steps
    trainer.unimitated_steps = unimitated_steps
