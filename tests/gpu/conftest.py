"""The device of these tests: a CUDA device; with COSMOS_GPU_DEVICE=cpu the CPU, for what has a form there too."""

from __future__ import annotations

import os

import pytest
import torch


@pytest.fixture
def device() -> torch.device:
    """The device that is tested; without one, the test is skipped and says so."""
    if os.environ.get("COSMOS_GPU_DEVICE", "cuda") == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device, and torch sees none; COSMOS_GPU_DEVICE=cpu runs it on the CPU")
    torch.backends.cuda.matmul.allow_tf32 = False
    return torch.device("cuda", 0)


@pytest.fixture
def cuda(device: torch.device) -> torch.device:
    """A CUDA device, for what no CPU has."""
    if device.type != "cuda":
        pytest.skip("needs a CUDA device: it has no form on a CPU")
    return device
