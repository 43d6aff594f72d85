"""Measures the use of devices: of their memory, and of the products that they can compute."""

from __future__ import annotations

import resource
from collections.abc import Mapping
from typing import Final

import torch

PEAKS: Final[Mapping[str, float]] = {
    "GB200": 2500e12,
    "B200": 2250e12,
    "H200 NVL": 835.5e12,
    "H200": 989e12,
    "H20": 148e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835.5e12,
    "H100": 989e12,
    "H800": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
}
"""Dense products of bf16 a second, without sparsity, by a part of the device's name: the first that is in it."""


def peak_of(device: torch.device) -> float:
    """Products a second that a device can compute; 0 where that is not known."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((peak for part, peak in PEAKS.items() if part in name), 0.0)


def memory() -> dict[str, float]:
    """The most bytes that this process has had so far, by name: on GPUs, or if it uses none, in RAM."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return {"memory_bytes": 1024.0 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}
    devices = range(torch.cuda.device_count())
    return {
        "memory_bytes": float(sum(map(torch.cuda.max_memory_allocated, devices))),
        "memory_reserved_bytes": float(sum(map(torch.cuda.max_memory_reserved, devices))),
    }
