"""Weights and checkpoints off a GPU and onto it; with two of them, from one to the other over NCCL."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.distributed as dist

from cosmos_core.policy.checkpoints.checkpoint import Place
from cosmos_core.policy.checkpoints.saver import copy_state
from cosmos_core.protocols import TensorSlice
from cosmos_core.protocols.quantization import FORMATS
from cosmos_core.rollout.serving.updates import Update, whole_layout
from cosmos_core.testing.worlds import run_world
from cosmos_core.transport.directives import WeightTarget
from cosmos_core.weights import staging, wire
from cosmos_core.weights.digest import digest_of, tensor_digest
from cosmos_core.weights.process_group import aside
from cosmos_core.weights.publisher import WeightPublisher
from cosmos_core.weights.quantization import matrix_shares, quantise_tensors
from cosmos_core.weights.receiver import WeightReceiver
from cosmos_core.weights.shards import local_shard
from cosmos_core.weights.snapshot import take_snapshot

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e8m0fnu,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
    torch.bool,
]
ROWS = 30_000
"""Of 1000 float32 values: several buffers of `staging`."""
SHAPE = (3000, 1000)
LAYOUT = {0: [(TensorSlice(name="w", start=(0, 0), shape=SHAPE), "bfloat16")]}


def weights(device, rows=ROWS):
    made = {"w": torch.randn(rows, 1000, device=device), "t": torch.randn(300, 70, device=device).t()}
    return {**made, "norm": torch.randn(1000, device=device), "scalar": torch.tensor(2.5, device=device)}


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_digest_is_the_same_on_every_device(device, dtype):
    bits = torch.randint(0, 256, (300, 5000 * dtype.itemsize), dtype=torch.uint8)
    # As bytes: not every device copies each dtype.
    values, there = (each.bool() if dtype is torch.bool else each.view(dtype) for each in (bits, bits.to(device)))
    assert tensor_digest("w", there) == tensor_digest("w", values)
    assert tensor_digest("w", there.t()) == tensor_digest("w", values.t())
    part = {"start": (7, 70_000), "shape": (1000, 200_000)}
    assert tensor_digest("w", there, **part) == tensor_digest("w", values, **part)


@pytest.mark.parametrize("transport", ["shared-memory", "zmq", "gloo"])
def test_what_is_published_beside_training_is_loaded_bit_for_bit(device, transport):
    """The weights change as soon as they may, while they are still being copied."""
    held = weights(device)
    expected = {name: tensor.bfloat16() for name, tensor in held.items()}
    loaded = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    update, layout = Update(1, loaded), {0: whole_layout(loaded)}
    with (
        WeightPublisher("run") as publisher,
        WeightReceiver(transport, run_id="run", host="here", stall_s=60) as receiver,
    ):
        snapshot = publisher.stage(1, held, torch.bfloat16)
        staging.settle()
        for tensor in held.values():
            tensor.fill_(9.0)
        published = publisher.seal(snapshot)
        target = WeightTarget(version=1, digest=published.digest, sources=(publisher.endpoint,), hosts=("here",))
        with receiver.fetch(target, layout, 120) as pieces:
            for rank, piece, data in pieces:
                assert data.device.type == "cpu"
                update.write_to(rank, piece, data)
            update.check()
            update.apply()
    assert digest_of(loaded) == digest_of(expected) == published.digest


def test_the_next_version_takes_the_page_locked_memory_of_the_last(cuda):
    held = weights(cuda)
    first = take_snapshot(1, held, torch.bfloat16)
    found = first.digests()
    assert first.file in staging._locked
    second = take_snapshot(2, held, torch.bfloat16, spare=first.file)
    assert second.file is first.file
    assert second.digests() == found
    second.file.close()
    del first, second
    gc.collect()
    # What was registered can be unmapped, and as much again be registered.
    third = take_snapshot(3, held, torch.bfloat16)
    assert third.digests() == found
    third.file.close()


def test_little_of_a_gpu_is_taken_to_publish_and_to_load(cuda):
    """The scratch of a digest and pieces of 32 MiB, whatever the size of the weights."""
    held = {"w": torch.randn(400_000, 1000, device=cuda)}
    loaded = {"w": torch.empty(400_000, 1000, device=cuda, dtype=torch.bfloat16)}
    before = torch.cuda.memory_allocated(cuda)
    torch.cuda.reset_peak_memory_stats(cuda)
    snapshot = take_snapshot(1, held, torch.bfloat16)
    snapshot.copying.wait()
    update = Update(1, loaded)
    piece = snapshot.entries[0].piece
    data = torch.frombuffer(bytearray(snapshot.read(piece)), dtype=torch.bfloat16).view(piece.shape)
    update.write(piece, data)
    update.apply()
    assert digest_of(loaded) == digest_of({"w": data})
    assert torch.cuda.max_memory_allocated(cuda) - before <= 600 << 20 < data.nbytes
    snapshot.file.close()


@pytest.mark.parametrize("form", sorted(FORMATS))
def test_codes_and_scales_of_a_device_are_those_that_it_attests(device, form):
    matrix, added = torch.randn(2, 4096, 1024, device=device)
    shares = {"w": local_shard(matrix, lambda share: share + added)}
    expected = quantise_tensors(FORMATS[form], {"w": matrix + added}, {"w": (4096, 1024)})
    for _ in range(2):
        quantised = matrix_shares(FORMATS[form], {"w": matrix}, {"w": (4096, 1024)}, {"w": shares["w"].merge})
        snapshot = take_snapshot(1, shares, None, quantised=quantised)
        assert snapshot.problem() == ""
        assert snapshot.digests() == {name: tensor_digest(name, each) for name, each in expected.items()}
        if device.type == "cuda":
            # The second time tables of keys are there: whatever waits for the GPU from here on fails.
            torch.cuda.set_sync_debug_mode("error")
            try:
                matrix_shares(FORMATS[form], {"w": matrix}, {"w": (4096, 1024)}, {"w": shares["w"].merge})
                take_snapshot(1, shares, None, quantised=quantised, spare=snapshot.file).copying.wait()
            finally:
                torch.cuda.set_sync_debug_mode("default")


def test_a_checkpoint_has_what_was_there_when_it_was_asked_for(device):
    state = {**weights(device), "count": torch.tensor(3)}
    expected = {name: tensor.cpu().clone() for name, tensor in state.items()}
    copied = copy_state(state, Place(run_id="r", step=1, stage=0, nonfinite_steps=0))
    staging.settle()
    for tensor in state.values():
        tensor.zero_()
    copied.copying.wait()
    assert all(torch.equal(copied.shares[name].tensor, each) for name, each in expected.items())


def test_what_arrives_is_taken_whole_and_gradients_have_a_stream_of_their_own(device):
    received = [torch.randint(256, (size,), dtype=torch.uint8, device=device) for size in (100 << 20, 0, 7)]
    assert all(map(torch.equal, staging.download(received), [each.cpu() for each in received]))
    if device.type == "cuda":
        others = {torch.cuda.Stream(device).cuda_stream for _ in range(64)}
        assert aside(device).cuda_stream not in others, "gradients would be waited for behind other copies"


def publish_or_fetch() -> bool:
    """Rank 0 publishes from its GPU, rank 1 fetches over its own, which holds only what is on its way."""
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
            loaded = {"w": torch.zeros(SHAPE, dtype=torch.bfloat16, device="cuda")}
            update = Update(1, loaded)
            target = WeightTarget(version=1, digest=digest, sources=(endpoint,), hosts=("here",))
            with receiver.fetch(target, LAYOUT, 120) as pieces:
                for to, piece, data in pieces:
                    assert not data.is_cuda
                    update.write_to(to, piece, data)
            peak = torch.cuda.max_memory_allocated() - loaded["w"].nbytes
            assert peak <= (wire.WINDOW + 1) * wire.REQUEST_BYTES
            update.apply()
            is_right = digest_of(loaded) == digest
        dist.barrier()
        return is_right


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices: NCCL takes one for each process")
def test_weights_travel_between_gpus() -> None:
    assert run_world(2, publish_or_fetch, timeout_s=240) == [True, True]
