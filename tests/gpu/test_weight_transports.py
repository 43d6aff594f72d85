"""Weights from one GPU to another over NCCL, each in a process of its own: it takes two GPUs."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from cosmos_core.protocols import TensorSlice
from cosmos_core.testing.worlds import run_world
from cosmos_core.transport.directives import WeightTarget
from cosmos_core.weights.digest import digest_of
from cosmos_core.weights.publisher import WeightPublisher
from cosmos_core.weights.receiver import WeightReceiver

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices: NCCL takes one for each process"),
    pytest.mark.timeout(300),
]

SHAPE = (3000, 1000)
LAYOUT = {0: [(TensorSlice(name="w", start=(0, 0), shape=SHAPE), "bfloat16")]}


def publish_or_fetch() -> bool:
    """Rank 0 publishes from its GPU, rank 1 fetches to its own."""
    rank = dist.get_rank()
    torch.cuda.set_device(rank)
    said: list[object] = [None]
    with WeightPublisher("run") as publisher, WeightReceiver("nccl", run_id="run", host="here", stall_s=60) as receiver:
        if rank == 0:
            weights = torch.arange(SHAPE[0] * SHAPE[1], dtype=torch.float32, device="cuda").view(SHAPE)
            said = [(publisher.endpoint, publisher.publish(1, {"w": weights}, torch.bfloat16).digest)]
        dist.broadcast_object_list(said, 0)
        is_right = True
        if rank == 1:
            endpoint, digest = said[0]
            loaded = torch.zeros(SHAPE, dtype=torch.bfloat16, device="cuda")
            target = WeightTarget(version=1, digest=digest, sources=(endpoint,), hosts=("here",))
            with receiver.fetch(target, LAYOUT, 120) as pieces:
                for _, piece, data in pieces:
                    assert data.is_cuda
                    place = tuple(slice(s, s + n) for s, n in zip(piece.start, piece.shape, strict=True))
                    loaded[place] = data
            is_right = digest_of({"w": loaded}) == digest
        dist.barrier()
        return is_right


def test_weights_travel_between_gpus() -> None:
    assert run_world(2, publish_or_fetch, timeout_s=240) == [True, True]
