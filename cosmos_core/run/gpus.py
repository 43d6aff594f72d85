"""Tells which GPUs there are, and touches none."""

from __future__ import annotations

import os
from pathlib import Path


def visible_gpus(devices: Path = Path("/dev")) -> list[str]:
    """GPUs of this machine as CUDA names them: those of CUDA_VISIBLE_DEVICES, else all."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [gpu.strip() for gpu in chosen.split(",") if gpu.strip()]
    numbers = [path.name.removeprefix("nvidia") for path in devices.glob("nvidia*")]
    return sorted((number for number in numbers if number.isdecimal()), key=int)
