"""The system calls that a confined program may make, with their numbers by machine; all others fail with EPERM.

There is none that starts a process or a thread, opens a socket, changes a file, or touches another process: where one
could, its arguments are looked at.
"""

import fcntl
import os
import socket
import termios
from typing import Final, NamedTuple

MACHINES: Final = {"x86_64": 0, "aarch64": 1}
"""Places in the tuples below."""

_WHOLE: Final = 0xFFFFFFFF


class Condition(NamedTuple):
    """A condition on an argument: one of these values where the mask has ones. The kernel reads 32 bits of each.

    A named tuple, and no attrs class, for the confined process has the standard library alone.
    """

    argument: int
    values: tuple[int, ...]
    mask: int = _WHOLE


def conditions(pid: int) -> dict[str, tuple[Condition, ...]]:
    """By system call, what all must hold of its arguments; `pid` is the program's own process."""
    # What can be read could be emptied by O_TRUNC where Landlock knows no truncation (Linux before 6.2).
    changing = os.O_ACCMODE | os.O_CREAT | os.O_TRUNC
    # The kernel sends signals to whom F_SETOWN or an ioctl names, and Landlock holds them back from Linux 6.12 on only.
    duplicating = (fcntl.F_DUPFD, fcntl.F_DUPFD_CLOEXEC)
    flags = (fcntl.F_GETFD, fcntl.F_SETFD, fcntl.F_GETFL, fcntl.F_SETFL)
    # Sockets of other types than streams send to any socket of the file system, connected or not.
    stream = Condition(1, (socket.SOCK_STREAM,), _WHOLE & ~(socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK))
    return {
        "fcntl": (Condition(1, (*duplicating, *flags)),),
        "ioctl": (Condition(1, (termios.TCGETS, termios.FIONBIO, termios.FIOCLEX, termios.FIONREAD)),),
        "kill": (Condition(0, (pid,)),),
        "open": (Condition(1, (os.O_RDONLY,), changing),),
        "openat": (Condition(2, (os.O_RDONLY,), changing),),
        "prlimit64": (Condition(0, (0,)),),
        "socketpair": (Condition(0, (socket.AF_UNIX,)), stream),
        "tgkill": (Condition(0, (pid,)),),
    }


ALLOWED: Final[dict[str, tuple[int | None, int | None]]] = {
    "access": (21, None),
    "alarm": (37, None),
    "arch_prctl": (158, None),
    "brk": (12, 214),
    "clock_getres": (229, 114),
    "clock_gettime": (228, 113),
    "clock_nanosleep": (230, 115),
    "close": (3, 57),
    "close_range": (436, 436),
    "dup": (32, 23),
    "dup2": (33, None),
    "dup3": (292, 24),
    "epoll_create1": (291, 20),
    "epoll_ctl": (233, 21),
    "epoll_pwait": (281, 22),
    "epoll_wait": (232, None),
    "eventfd2": (290, 19),
    "exit": (60, 93),
    "exit_group": (231, 94),
    "faccessat": (269, 48),
    "faccessat2": (439, 439),
    "fcntl": (72, 25),
    "fstat": (5, 80),
    "fstatfs": (138, 44),
    "futex": (202, 98),
    "get_robust_list": (274, 100),
    "getcwd": (79, 17),
    "getdents64": (217, 61),
    "getegid": (108, 177),
    "geteuid": (107, 175),
    "getgid": (104, 176),
    "getgroups": (115, 158),
    "getitimer": (36, 102),
    "getpeername": (52, 205),
    "getpgid": (121, 155),
    "getpgrp": (111, None),
    "getpid": (39, 172),
    "getppid": (110, 173),
    "getrandom": (318, 278),
    "getresgid": (120, 150),
    "getresuid": (118, 148),
    "getrlimit": (97, 163),
    "getrusage": (98, 165),
    "getsid": (124, 156),
    "getsockname": (51, 204),
    "getsockopt": (55, 209),
    "gettid": (186, 178),
    "gettimeofday": (96, 169),
    "getuid": (102, 174),
    "ioctl": (16, 29),
    "kill": (62, 129),
    "lseek": (8, 62),
    "lstat": (6, None),
    "madvise": (28, 233),
    "membarrier": (324, 283),
    "mmap": (9, 222),
    "mprotect": (10, 226),
    "mremap": (25, 216),
    "munmap": (11, 215),
    "nanosleep": (35, 101),
    "newfstatat": (262, 79),
    "open": (2, None),
    "openat": (257, 56),
    "pause": (34, None),
    "pipe": (22, None),
    "pipe2": (293, 59),
    "poll": (7, None),
    "ppoll": (271, 73),
    "pread64": (17, 67),
    "prlimit64": (302, 261),
    "pselect6": (270, 72),
    "pwrite64": (18, 68),
    "read": (0, 63),
    "readlink": (89, None),
    "readlinkat": (267, 78),
    "readv": (19, 65),
    "recvfrom": (45, 207),
    "recvmsg": (47, 212),
    "restart_syscall": (219, 128),
    "rseq": (334, 293),
    "rt_sigaction": (13, 134),
    "rt_sigpending": (127, 136),
    "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139),
    "rt_sigsuspend": (130, 133),
    "rt_sigtimedwait": (128, 137),
    "sched_getaffinity": (204, 123),
    "sched_yield": (24, 124),
    "select": (23, None),
    "sendmsg": (46, 211),
    "sendto": (44, 206),
    "set_robust_list": (273, 99),
    "set_tid_address": (218, 96),
    "setitimer": (38, 103),
    "setsockopt": (54, 208),
    "shutdown": (48, 210),
    "sigaltstack": (131, 132),
    "socketpair": (53, 199),
    "stat": (4, None),
    "statfs": (137, 43),
    "statx": (332, 291),
    "sysinfo": (99, 179),
    "tgkill": (234, 131),
    "time": (201, None),
    "timerfd_create": (283, 85),
    "timerfd_gettime": (287, 87),
    "timerfd_settime": (286, 86),
    "times": (100, 153),
    "uname": (63, 160),
    "write": (1, 64),
    "writev": (20, 66),
}
"""Numbers on x86_64 and aarch64; None where the machine has no such call."""
