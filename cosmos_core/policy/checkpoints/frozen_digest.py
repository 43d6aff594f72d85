"""The weights below adapters: a checkpoint has none of them, so it remembers their digest."""

from __future__ import annotations

from typing import Final

import msgspec
import torch

from cosmos_core.errors import CheckpointError
from cosmos_core.weights.digest import add_digests, combine, tensor_digest
from cosmos_core.weights.shards import Exchange, canonical_tensors, local_shards, owned

DRAWN: Final = "the model drawn from run.seed"
"""What a model without a path is called."""


def frozen_digest(module: torch.nn.Module, rank: int, exchange: Exchange) -> str:
    """The digest of all frozen weights of a replica, whatever its layout; each of its processes calls it.

    Args:
        module: What this process holds.
        rank: Of this process.
        exchange: Between the processes of the replica.
    """
    frozen = {name for name, parameter in module.named_parameters() if not parameter.requires_grad}
    shares = local_shards({name: tensor for name, tensor in canonical_tensors(module).items() if name in frozen})
    own = {
        name: tensor_digest(name, shares[name].tensor, start=shares[name].start, shape=shares[name].shape)
        for name in owned(shares, rank, exchange)
    }
    said = exchange(msgspec.json.encode(own))
    return combine(add_digests(msgspec.json.decode(each, type=dict[str, int]) for each in said))


def check_below(path: str, *, expected: str, found: str, name: str) -> None:
    """Refuse to add adapters to weights that they were not trained with.

    Args:
        path: Of the checkpoint with the adapters.
        expected: Digest of the weights that they were trained with.
        found: Digest of those that are here.
        name: Path or name of the model that is here.

    Raises:
        CheckpointError: They differ.
    """
    if found != expected:
        raise CheckpointError(
            f"{path} has adapters for other weights than those of {name}: their digest is {expected} there and {found} "
            "here; give model.path the model, unchanged, that the run began with"
        )
