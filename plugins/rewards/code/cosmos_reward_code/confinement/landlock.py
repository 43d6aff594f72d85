"""No file can be written, run or opened but what Python itself reads (Landlock, Linux 5.13 and newer).

Source: https://docs.kernel.org/userspace-api/landlock.html
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable
from typing import Final

from cosmos_reward_code.confinement.kernel import syscall

_CREATE_RULESET: Final = 444
_ADD_RULE: Final = 445
_RESTRICT_SELF: Final = 446
_GET_VERSION: Final = 1
_PATH_BENEATH: Final = 1
_READ_FILE: Final = 1 << 2
_READ_DIR: Final = 1 << 3
_FILE_RIGHTS: Final = (13, 14, 15, 15, 16)
"""Number of rights over files by version, from 1 on; the last holds for newer ones."""
_TCP: Final = 0b11
_SCOPES: Final = 0b11
"""Abstract sockets and signals stay inside."""


def restrict(readable: Iterable[str]) -> None:
    """Leave this process nothing of the file system but reading below these paths; what does not exist is passed over.

    Raises:
        OSError: The kernel has no Landlock, or it is switched off.
    """
    version = syscall(_CREATE_RULESET, None, 0, _GET_VERSION)
    files = (1 << _FILE_RIGHTS[min(version, len(_FILE_RIGHTS)) - 1]) - 1
    attributes = struct.pack("=Q", files)
    if version >= 4:
        attributes += struct.pack("=Q", _TCP)
    if version >= 6:
        attributes += struct.pack("=Q", _SCOPES)
    ruleset = syscall(_CREATE_RULESET, attributes, len(attributes), 0)
    for path in readable:
        _allow_reading(ruleset, path)
    syscall(_RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)


def _allow_reading(ruleset: int, path: str) -> None:
    try:
        beneath = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    rights = _READ_FILE | _READ_DIR if os.path.isdir(path) else _READ_FILE  # noqa: PTH112 - pathlib takes long to import
    syscall(_ADD_RULE, ruleset, _PATH_BENEATH, struct.pack("=Qi", rights, beneath), 0)
    os.close(beneath)
