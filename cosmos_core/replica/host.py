"""Which machine this is."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Final

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


def host_id() -> str:
    """A name of this machine since its last boot: processes with equal ones can share memory.

    The host's name alone is not enough (containers and cloned machines may share one), nor is the boot id (containers
    of one machine have the same, but not the same `/dev/shm`).
    """
    try:
        boot = _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        boot = "unknown-boot"
    return f"{platform.node()}/{boot}"
