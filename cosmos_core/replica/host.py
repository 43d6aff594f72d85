"""Which machine this is, and where it stands."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Final

from cosmos_core.errors import ReplicaError

RACK: Final = "COSMOS_RACK"
"""Environment variable with a label of the rack, switch or zone that this machine is in."""

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


def rack_id() -> str:
    """The label of this machine's rack, as `COSMOS_RACK` gives it; empty if it does not.

    Raises:
        ReplicaError: The label has white space or an @, by which labels are told apart.
    """
    label = os.environ.get(RACK, "").strip()
    if "@" in label or len(label.split()) > 1:
        raise ReplicaError(f"{RACK}={label!r}: a label has neither white space nor an @; give one word, such as rack-7")
    return label
