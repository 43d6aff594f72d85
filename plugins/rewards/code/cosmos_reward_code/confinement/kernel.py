"""System calls that Python has no name for."""

from __future__ import annotations

import ctypes
import os
import struct
from typing import Final

_LIBC: Final = ctypes.CDLL(None, use_errno=True)

_CAPSET: Final = {"x86_64": 126, "aarch64": 91}
_CAPABILITY_VERSION_3: Final = 0x20080522
_PR_SET_PDEATHSIG: Final = 1
_PR_SET_NO_NEW_PRIVS: Final = 38
_SIGKILL: Final = 9


def syscall(number: int, *arguments: int | bytes | None) -> int:
    """Make a system call.

    Raises:
        OSError: It failed.
    """
    converted = [ctypes.c_long(each) if isinstance(each, int) else each for each in arguments]
    result = int(_LIBC.syscall(ctypes.c_long(number), *converted))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


def prctl(option: int, second: int = 0, third: int | bytes = 0) -> None:
    """Change something of this process.

    Raises:
        OSError: It failed.
    """
    last = third if isinstance(third, bytes) else ctypes.c_ulong(third)
    if _LIBC.prctl(option, ctypes.c_ulong(second), last, ctypes.c_ulong(0), ctypes.c_ulong(0)) < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def renounce() -> None:
    """Give up every privilege for good: no new ones by running a file, and no capabilities, not even root's.

    Raises:
        OSError: The kernel refuses.
    """
    prctl(_PR_SET_NO_NEW_PRIVS, 1)
    header = struct.pack("=Ii", _CAPABILITY_VERSION_3, 0)
    syscall(_CAPSET[os.uname().machine], header, bytes(24))


def die_with(parent: int) -> None:
    """Be killed when the parent ends.

    Raises:
        ProcessLookupError: It has ended.
    """
    prctl(_PR_SET_PDEATHSIG, _SIGKILL)
    if os.getppid() != parent:
        raise ProcessLookupError("the reward's process has ended")
