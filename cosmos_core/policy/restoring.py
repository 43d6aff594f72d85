"""Goes on from a checkpoint, after checking that it is one of this run's model."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from cosmos_core.errors import CheckpointError
from cosmos_core.policy.checkpoint import read_place
from cosmos_core.policy.reading import READ_ERRORS, CheckpointReader
from cosmos_core.policy.saving import RNG
from cosmos_core.policy.trainer import Trainer


def restore(trainer: Trainer, path: str, begin_stage: Callable[[int], None]) -> None:
    """Load weights, optimizer, step and random state.

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
    targets = {**trainer.state(), RNG: torch.get_rng_state()}
    try:
        reader = CheckpointReader(path)
        difference = next(_differences(reader.read_metadata(), targets), None)
        if difference is not None:
            raise CheckpointError(f"{path} is of another model: {difference}")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
            load(targets, storage_reader=reader, no_dist=True)
    except READ_ERRORS as error:
        reason = str(error).strip().split("\n", 1)[0] or type(error).__name__
        raise CheckpointError(f"{path} is damaged: {reason}") from error
    torch.set_rng_state(targets[RNG])
    trainer.step = place.step
    trainer.nonfinite_steps = place.nonfinite_steps


def _differences(metadata: Metadata, targets: Mapping[str, torch.Tensor]) -> Iterator[str]:
    saved = metadata.state_dict_metadata
    for name, tensor in targets.items():
        entry = saved.get(name)
        if not isinstance(entry, TensorStorageMetadata):
            yield f"it lacks {name}"
        elif name != RNG and tuple(entry.size) != tuple(tensor.shape):
            yield f"{name} has shape {tuple(entry.size)} there and {tuple(tensor.shape)} here"
    for name in saved:
        if name not in targets:
            yield f"it has {name}, which this model lacks"
