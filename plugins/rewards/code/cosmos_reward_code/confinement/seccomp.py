"""Only listed system calls are made; all others fail with EPERM (seccomp, a filter in the kernel).

Source: https://docs.kernel.org/userspace-api/seccomp_filter.html
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Iterator
from typing import Final

from cosmos_reward_code.confinement.kernel import prctl
from cosmos_reward_code.confinement.syscalls import ALLOWED, MACHINES, Condition, conditions

_AUDIT: Final = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_PR_SET_SECCOMP: Final = 22
_MODE_FILTER: Final = 2
_LOAD: Final = 0x20
_AND: Final = 0x54
_IF_EQUAL: Final = 0x15
_RETURN: Final = 0x06
_ALLOW: Final = 0x7FFF0000
_REFUSE: Final = 0x00050000 | errno.EPERM
_KILL: Final = 0x80000000
# Places in `struct seccomp_data`; of the first argument the lower half, on machines that are little-endian.
_NUMBER: Final = 0
_MACHINE: Final = 4
_ARGUMENTS: Final = 16
_ARGUMENT_BYTES: Final = 8


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
    conditional = conditions(pid)
    for name, numbers in ALLOWED.items():
        number = numbers[MACHINES[machine]]
        if number is None:
            continue
        checks = [step for condition in conditional.get(name, ()) for step in _checked(condition)]
        yield _instruction(_IF_EQUAL, number, skip_else=len(checks) + 1)
        yield from checks
        yield _instruction(_RETURN, _ALLOW)
    yield _instruction(_RETURN, _REFUSE)


def _checked(condition: Condition) -> Iterator[bytes]:
    """Go on after these instructions if the condition holds, else refuse."""
    yield _instruction(_LOAD, _ARGUMENTS + _ARGUMENT_BYTES * condition.argument)
    yield _instruction(_AND, condition.mask)
    for left in range(len(condition.values), 0, -1):
        yield _instruction(_IF_EQUAL, condition.values[-left], skip_if=left)
    yield _instruction(_RETURN, _REFUSE)


def _instruction(code: int, operand: int, *, skip_if: int = 0, skip_else: int = 0) -> bytes:
    return struct.pack("=HBBI", code, skip_if, skip_else, operand)
