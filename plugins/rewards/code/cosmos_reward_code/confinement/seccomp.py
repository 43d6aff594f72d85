"""Only listed system calls are made; all others fail with EPERM (seccomp, a filter in the kernel).

Source: https://docs.kernel.org/userspace-api/seccomp_filter.html
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import struct
from collections.abc import Iterator
from typing import Final

from cosmos_reward_code.confinement.kernel import prctl
from cosmos_reward_code.confinement.syscalls import ALLOWED, MACHINES, ONLY_UNIX, ONLY_WITH_OWN_PID, ONLY_WITH_ZERO

_AUDIT: Final = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_PR_SET_SECCOMP: Final = 22
_MODE_FILTER: Final = 2
_LOAD: Final = 0x20
_IF_EQUAL: Final = 0x15
_RETURN: Final = 0x06
_ALLOW: Final = 0x7FFF0000
_REFUSE: Final = 0x00050000 | errno.EPERM
_KILL: Final = 0x80000000
# Places in `struct seccomp_data`; of an argument, the lower half on machines that are little-endian, and the upper.
_NUMBER: Final = 0
_MACHINE: Final = 4
_LOWER: Final = 16
_UPPER: Final = 20


def restrict() -> None:
    """Leave this process the listed system calls, for good.

    Raises:
        OSError: The kernel has no seccomp, or refuses.
    """
    program = b"".join(_program(os.uname().machine, os.getpid()))
    instructions = ctypes.create_string_buffer(program, len(program))
    prctl(_PR_SET_SECCOMP, _MODE_FILTER, struct.pack("HxxxxxxQ", len(program) // 8, ctypes.addressof(instructions)))


def _program(machine: str, pid: int) -> Iterator[bytes]:
    yield _instruction(_LOAD, _MACHINE)
    yield _instruction(_IF_EQUAL, _AUDIT[machine], skip_if=1)
    yield _instruction(_RETURN, _KILL)
    yield _instruction(_LOAD, _NUMBER)
    for name, numbers in ALLOWED.items():
        number = numbers[MACHINES[machine]]
        if number is None:
            continue
        wanted = _first_argument(name, pid)
        if wanted is None:
            yield _instruction(_IF_EQUAL, number, skip_else=1)
            yield _instruction(_RETURN, _ALLOW)
        else:
            yield _instruction(_IF_EQUAL, number, skip_else=6)
            yield _instruction(_LOAD, _UPPER)
            yield _instruction(_IF_EQUAL, 0, skip_else=3)
            yield _instruction(_LOAD, _LOWER)
            yield _instruction(_IF_EQUAL, wanted, skip_else=1)
            yield _instruction(_RETURN, _ALLOW)
            yield _instruction(_RETURN, _REFUSE)
    yield _instruction(_RETURN, _REFUSE)


def _first_argument(name: str, pid: int) -> int | None:
    """What the call's first argument must be; None: anything."""
    if name in ONLY_WITH_OWN_PID:
        return pid
    if name in ONLY_UNIX:
        return int(socket.AF_UNIX)
    return 0 if name in ONLY_WITH_ZERO else None


def _instruction(code: int, operand: int, *, skip_if: int = 0, skip_else: int = 0) -> bytes:
    return struct.pack("=HBBI", code, skip_if, skip_else, operand)
