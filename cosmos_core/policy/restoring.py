"""Goes on from a checkpoint, after checking that it is one of this run's model."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import torch

from cosmos_core.policy.checkpoint import read_place
from cosmos_core.policy.reading import load_shares
from cosmos_core.policy.saving import RNG
from cosmos_core.policy.trainer import Trainer
from cosmos_core.weights.held import all_held, held


def restore(trainer: Trainer, path: str, begin_stage: Callable[[int], None]) -> None:
    """Load weights, optimizer, step and random state, whatever layout they were saved from.

    All processes of the replica call it, and each reads what it holds.

    Args:
        trainer: Overwritten.
        path: Path or URL of the checkpoint.
        begin_stage: Makes the trainer take up a stage, by index.

    Raises:
        CheckpointError: The checkpoint is incomplete, damaged, or of another model.
    """
    place = read_place(path)
    if place.stage != trainer.stage.index:
        begin_stage(place.stage)
    random = torch.get_rng_state()
    targets = {**all_held(trainer.state()), RNG: held(random)}
    said = trainer.world.exchange(msgspec.json.encode(list(targets)))
    names = {name for each in said for name in msgspec.json.decode(each, type=list[str])}
    load_shares(path, targets, names)
    torch.set_rng_state(random)
    trainer.step = place.step
    trainer.nonfinite_steps = place.nonfinite_steps
