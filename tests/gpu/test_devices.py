"""A GPU is found, told alike by torch and the driver, and its process stays near it."""

from __future__ import annotations

import os
import shutil

import pytest
import torch

from cosmos_core.devices import choose_device, gpus, near_cpus, stay_near

pytestmark = pytest.mark.gpu


def test_auto_is_the_gpu_and_its_process_stays_near_it(cuda: torch.device) -> None:
    device = choose_device("policy.device", "auto")
    assert device == choose_device("policy.device", "cuda") == cuda
    before = os.sched_getaffinity(0)
    card = torch.cuda.get_device_properties(device)
    near = near_cpus(f"{card.pci_domain_id:04x}:{card.pci_bus_id:02x}:{card.pci_device_id:02x}.0")
    try:
        stay_near(device)
        assert os.sched_getaffinity(0) == (near & before or before)
    finally:
        os.sched_setaffinity(0, before)


@pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="needs nvidia-smi, which is not on the path")
def test_the_driver_tells_the_memory_that_torch_sees(cuda: torch.device) -> None:
    total = torch.cuda.get_device_properties(cuda).total_memory
    # The driver keeps some for itself.
    assert any(total <= gpu.memory_bytes <= 1.1 * total for gpu in gpus())
