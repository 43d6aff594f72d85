"""The memory of tensors is given up and taken again; what was in it comes back as it was."""

import gc
from types import SimpleNamespace

import psutil
import pytest
import torch

from cosmos_core.errors import AttestationError, WeightSyncError
from cosmos_core.weights.storages import Sleeper, Storages

CPU = torch.device("cpu")
MIB = 1 << 20


def resident():
    gc.collect()
    return psutil.Process().memory_info().rss


@pytest.fixture
def held():
    """Tensors of 64 MiB in many storages, a view of one, and one of an odd size."""
    tensors = [torch.randn(MIB // 4) for _ in range(64)]
    return [*tensors, tensors[0][7:9], torch.arange(5, dtype=torch.uint8)]


def test_memory_is_given_up_and_what_was_in_it_comes_back(held, tmp_path):
    before, contents = resident(), [each.clone() for each in held[-3:]]
    storages = Storages(held, CPU)
    assert storages.nbytes == 64 * MIB + 5
    useless = torch.zeros(MIB // 4)
    besides = Storages([useless], CPU)
    asleep = Sleeper(tmp_path)
    asleep.sleep(storages, besides)
    assert before - resident() > 48 * MIB
    assert list(tmp_path.iterdir()) == []
    asleep.wake()
    assert all(map(torch.equal, held[-3:], contents))
    useless.zero_()
    held[0][7] = 3.0
    assert held[-2][0] == 3.0


def test_what_comes_back_otherwise_is_told(held, tmp_path):
    asleep = Sleeper(tmp_path)
    asleep.sleep(Storages(held, CPU), Storages([], CPU))
    asleep._memory.buffer[MIB : MIB + 9] = b"otherwise"
    with pytest.raises(AttestationError, match="woke with the digest"):
        asleep.wake()


def test_what_wakes_without_room_is_told(held):
    def full(size):
        raise torch.OutOfMemoryError("2 MiB more")

    storages = Storages(held, CPU)
    storages._storages[:] = [(SimpleNamespace(resize_=full), MIB)]
    with pytest.raises(WeightSyncError, match=r"no room for the .* \(2 MiB more\).*memory_share.*micro_batch_units"):
        storages.allocate()


def test_memory_of_others_stays(tmp_path):
    (tmp_path / "mapped").write_bytes(bytes(64))
    mapped = torch.from_file(str(tmp_path / "mapped"), size=64, dtype=torch.uint8)
    storages = Storages([mapped, torch.empty(3, device="meta")], CPU)
    storages.free()
    assert (storages.nbytes, int(mapped.sum())) == (0, 0)
