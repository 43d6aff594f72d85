from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from cosmos_core.errors import WeightSyncError
from cosmos_engine_vllm.ranks import StagedMemory, aligned, map_staged, region


def num_descriptors():
    return len(list(Path("/proc/self/fd").iterdir()))


def test_tensors_of_any_dtype_are_found_where_they_were_put():
    put = [torch.tensor([1, 2, 3], dtype=torch.int8), torch.randn(2, 3), torch.tensor(7.0, dtype=torch.bfloat16)]
    put.append(torch.empty(0, 4))
    memory = StagedMemory(sum(aligned(each.nbytes) for each in put), "rank 1")
    found = map_staged(memory.descriptor)
    offset = 0
    for each in put:
        region(memory.bytes, offset, each.dtype, tuple(each.shape)).copy_(each)
        assert torch.equal(region(found, offset, each.dtype, tuple(each.shape)), each)
        offset += aligned(each.nbytes)
    # Who reads it has a copy of what it writes to.
    found.zero_()
    assert region(memory.bytes, 0, torch.int8, (3,)).tolist() == [1, 2, 3]
    memory.close()


def test_what_was_mapped_stays_when_the_memory_is_closed_and_nothing_else_does():
    before = num_descriptors()
    memory = StagedMemory(0, "rank 1")
    memory.bytes.fill_(5)
    found = map_staged(memory.descriptor)
    memory.close()
    memory.close()
    assert found.tolist() == [5]
    with pytest.raises(WeightSyncError, match="cannot be mapped"):
        map_staged(memory.descriptor)
    del memory, found
    StagedMemory(1, "rank 1")
    assert num_descriptors() <= before


def test_no_memory_and_no_descriptor_are_told(monkeypatch):
    for fails in ["memfd_create", "posix_fallocate"]:

        def refuse(*_):
            raise OSError(24, "Too many open files")

        before = num_descriptors()
        monkeypatch.setattr(os, fails, refuse)
        with pytest.raises(WeightSyncError, match=r"1,000 bytes of memory .* way to rank 1 \(Too many open files\)"):
            StagedMemory(1000, "rank 1")
        assert num_descriptors() <= before
