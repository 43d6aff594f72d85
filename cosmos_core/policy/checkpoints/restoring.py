"""Goes on from a checkpoint, after checking that it is one of this run's model."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import torch

from cosmos_core.errors import CheckpointError
from cosmos_core.models.adapters.below import check_below
from cosmos_core.policy.checkpoints.checkpoint import read_place
from cosmos_core.policy.checkpoints.reading import load_shares
from cosmos_core.policy.checkpoints.saving import RNG
from cosmos_core.policy.training.trainer import Trainer
from cosmos_core.weights.held import all_held, held


def restore(
    trainer: Trainer, path: str, begin_stage: Callable[[int], None], *, run_id: str = "", name: str = "this model"
) -> None:
    """Load weights, optimizer, step and random state, whatever layout they were saved from.

    All processes of the replica call it, and each reads what it holds.

    Args:
        trainer: Overwritten.
        path: Path or URL of the checkpoint.
        begin_stage: Makes the trainer take up a stage, by index.
        run_id: Of the run that goes on; empty if any run's checkpoint will do.
        name: Of the model that is trained, for people.

    Raises:
        CheckpointError: The checkpoint is incomplete, damaged, of another run, or of another model.
    """
    place = read_place(path)
    if run_id and place.run_id != run_id:
        raise CheckpointError(
            f"{path} is of run {place.run_id!r}, and {run_id!r} goes on; give each run its own policy.checkpoint.url"
        )
    if place.stage != trainer.stage.index:
        begin_stage(place.stage)
    random = torch.get_rng_state()
    targets = {**all_held(trainer.state()), RNG: held(random)}
    own = {name: share.placement.shape for name, share in targets.items()}
    shapes: dict[str, tuple[int, ...]] = {}
    for said in trainer.world.exchange(msgspec.json.encode(own)):
        shapes |= msgspec.json.decode(said, type=dict[str, tuple[int, ...]])
    load_shares(path, targets, shapes)
    if place.below:
        check_below(path, expected=place.below, found=trainer.below, name=name)
    torch.set_rng_state(random)
    trainer.step = place.step
    trainer.nonfinite_steps = place.nonfinite_steps
    trainer.unimitated_steps = place.unimitated_steps
