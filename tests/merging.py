"""What a model with adapters publishes, whole and all of it at once."""

from __future__ import annotations

from torch.distributed.tensor import DTensor

from cosmos_core.models.parallel.lora import published_tensors
from cosmos_core.weights.shards import local_shard


def published(module):
    """Each tensor as it is sent, spread as it is held; every process calls it."""
    tensors, merges = published_tensors(module)
    return {name: tensor if name not in merges else _sent(tensor, merges[name]) for name, tensor in tensors.items()}


def _sent(tensor, merge):
    local = local_shard(tensor, merge).sent()
    if not isinstance(tensor, DTensor):
        return local
    place = {"run_check": False, "shape": tensor.shape, "stride": tensor.stride()}
    return DTensor.from_local(local, tensor.device_mesh, tensor.placements, **place)
