"""Who sleeps gives the memory of its device up, and wakes as it was."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cosmos_core.models.diffusion.family import Part
from cosmos_core.weights.digest import digest_of
from cosmos_core.weights.storages import Sleeper, Storages

pytestmark = pytest.mark.gpu

MIB = 1 << 20


def test_what_sleeps_is_in_the_machines_memory_and_comes_back(device: torch.device, tmp_path: Path) -> None:
    others = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    held = [torch.randn(MIB, device=device) for _ in range(16)]
    gradients = torch.ones(16 * MIB, device=device)
    before, views, sleeper = digest_of({"all": torch.stack(held)}), [each[3:5] for each in held], Sleeper(tmp_path)
    free = []
    for _ in range(2):
        storages = Storages([*held, *views], device)
        assert storages.nbytes == 64 * MIB
        sleeper.sleep(storages, Storages([gradients], device))
        if device.type == "cuda":
            assert torch.cuda.memory_allocated(device) - others < 8 * MIB
            free.append(torch.cuda.mem_get_info(device)[0])
        sleeper.wake()
        gradients.zero_()
    assert digest_of({"all": torch.stack(held)}) == before
    assert all(torch.equal(view, each[3:5]) for view, each in zip(views, held, strict=True))
    if device.type == "cuda":
        assert free[0] - torch.cuda.mem_get_info(device)[0] > 64 * MIB, "other processes had what was given up"


def test_an_encoder_that_sleeps_leaves_the_gpu(cuda: torch.device) -> None:
    part = Part(lambda: torch.nn.Linear(4096, 4096), lambda: cuda)
    with part.used():
        held = torch.cuda.memory_allocated(cuda)
    part.leave()
    assert held - torch.cuda.memory_allocated(cuda) >= 64 * MIB
