"""Facts about this machine that no library of Python knows: its NVIDIA GPUs, as `nvidia-smi` tells them."""

from __future__ import annotations

import csv
import io
import shutil
import subprocess
from typing import Final

import attrs

_TIMEOUT_S: Final = 5.0
_FIELDS: Final = "name,memory.total,memory.free,driver_version"


@attrs.frozen(kw_only=True)
class Gpu:
    """One GPU; memory in bytes."""

    name: str
    memory_bytes: int
    free_bytes: int
    driver: str


def gpus() -> list[Gpu]:
    """The GPUs of this machine, whatever CUDA_VISIBLE_DEVICES says; empty without `nvidia-smi` or a driver.

    Raises:
        OSError: `nvidia-smi` cannot be started.
        subprocess.TimeoutExpired: It hangs.
        ValueError: It says what is no such table.
    """
    command = shutil.which("nvidia-smi")
    if command is None:
        return []
    asked = [command, f"--query-gpu={_FIELDS}", "--format=csv,noheader,nounits"]
    answer = subprocess.run(asked, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    if answer.returncode != 0:
        return []
    rows = csv.reader(io.StringIO(answer.stdout), skipinitialspace=True)
    return [
        Gpu(name=name, memory_bytes=_bytes(total), free_bytes=_bytes(free), driver=driver)
        for name, total, free, driver in rows
    ]


def _bytes(mebibytes: str) -> int:
    """Some boards share the host's memory, and say `[N/A]`."""
    return int(mebibytes) << 20 if mebibytes.isdecimal() else 0
