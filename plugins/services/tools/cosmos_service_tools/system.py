"""Checks of the machine: processors and memory, ports, shared memory, disks, limits, keys."""

from __future__ import annotations

import os
import resource
import shutil
import socket
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Final

import psutil

from cosmos_core.errors import ConfigError
from cosmos_core.transport.key_folder import check_folder
from cosmos_service_tools.findings import Check, Finding, ok, problem, warning

_GIB: Final = 1 << 30
_LEAST_MEMORY: Final = 2 * _GIB
CGROUP_LIMIT: Final = Path("/sys/fs/cgroup/memory.max")
"""The memory that a container may take, where there is a limit."""
_SHARED: Final = Path("/dev/shm")  # noqa: S108 - it is looked at, and nothing is written
_LEAST_SHARED: Final = _GIB
_LEAST_FREE_SHARED: Final = 64 << 20
_LEAST_DISK: Final = _GIB
_LITTLE_DISK: Final = 20 * _GIB
_LEAST_FILES: Final = 1024
_FEW_FILES: Final = 4096


def checks(output: Path) -> dict[str, Check]:
    """The checks by name; `output` is the folder of runs."""
    return {
        "machine": machine,
        "ports": ports,
        str(_SHARED): shared_memory,
        "disk": partial(disks, output),
        "ulimit -n": files,
        "keys": keys,
    }


def machine() -> Iterator[Finding]:
    """Look at cores and memory."""
    memory = psutil.virtual_memory()
    limit = CGROUP_LIMIT.read_text(encoding="ascii").strip() if CGROUP_LIMIT.is_file() else ""
    total = min(memory.total, int(limit)) if limit.isdecimal() else memory.total
    text = (
        f"{len(os.sched_getaffinity(0))} cores, {_size(min(memory.available, total))} of {_size(total)} of memory free"
    )
    if min(memory.available, total) < _LEAST_MEMORY:
        yield warning("machine", text, "end other processes: torch alone takes half a GiB a process")
    else:
        yield ok("machine", text)


def ports() -> Iterator[Finding]:
    """Listen on loopback, and at the address of the host's name, where other machines would connect."""
    try:
        _listen("127.0.0.1")
    except OSError as error:
        yield problem(
            "ports", f"127.0.0.1 cannot be listened at: {error.strerror}", "bring loopback up: ip link set lo up"
        )
        return
    host = socket.gethostname()
    try:
        address = socket.gethostbyname(host)
        _listen(address)
    except OSError as error:
        text = f"loopback can be listened at, and {host}, this host's name, cannot: {error.strerror}"
        yield warning(
            "ports", text, "for runs on several machines put its address into /etc/hosts, or name it in control.bind"
        )
        return
    yield ok("ports", f"127.0.0.1 and {address} ({host}) can be listened at")


def _listen(address: str, port: int = 0) -> None:
    """Listen for a moment; raises OSError if that cannot be."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(1)


def shared_memory(folder: Path = _SHARED) -> Iterator[Finding]:
    """Look at the memory through which weights travel on one machine, and which vLLM and NCCL use."""
    name = "/dev/shm"  # noqa: S108 - as above
    if not folder.is_dir():
        yield warning(name, "there is none", 'weights travel otherwise: sync.transport = "zmq"')
        return
    size = shutil.disk_usage(folder)
    text = f"{_size(size.free)} of {_size(size.total)} free"
    if size.free < _LEAST_FREE_SHARED:
        yield problem(
            name, text, "remove what ended processes left there, or enlarge it: mount -o remount,size=16G /dev/shm"
        )
    elif size.total < _LEAST_SHARED:
        yield warning(name, text, "in a container: docker run --shm-size=16g; a pod: an emptyDir of medium Memory")
    else:
        yield ok(name, text)


def disks(output: Path) -> Iterator[Finding]:
    """Look at the file systems of runs and of temporary files."""
    for what, folder in (
        (f"runs ({output})", output),
        (f"temporary files ({tempfile.gettempdir()})", Path(tempfile.gettempdir())),
    ):
        place = folder.absolute()
        while not place.exists():
            place = place.parent
        free = shutil.disk_usage(place).free
        text = f"{what}: {_size(free)} free"
        if not os.access(place, os.W_OK):
            yield problem(
                "disk", f"{what}: {place} cannot be written", "take another folder: run.output_dir, or TMPDIR"
            )
        elif free < _LEAST_DISK:
            yield problem("disk", text, "free some, or take another folder: run.output_dir, or TMPDIR")
        elif free < _LITTLE_DISK:
            yield warning("disk", text, "a checkpoint takes 12 bytes a parameter: free some for models of billions")
        else:
            yield ok("disk", text)


def files() -> Iterator[Finding]:
    """Look at the number of files that a process may have open; a run raises the soft limit itself."""
    soft, hard = (_count(each) for each in resource.getrlimit(resource.RLIMIT_NOFILE))
    text = f"{soft} files a process, at most {hard}"
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if most != resource.RLIM_INFINITY and most < _FEW_FILES:
        tell = problem if most < _LEAST_FILES else warning
        yield tell("ulimit -n", text, "each replica takes some: raise the hard limit in /etc/security/limits.conf")
    else:
        yield ok("ulimit -n", text)


def _count(limit: int) -> str:
    return "any number" if limit == resource.RLIM_INFINITY else str(limit)


def keys() -> Iterator[Finding]:
    """Look at the folder `keys`, which `cosmos keys new keys` makes."""
    folder = Path("keys")
    if not folder.is_dir():
        yield ok("keys", "no folder keys here; only runs that other machines can reach need one: cosmos keys new keys")
        return
    try:
        check_folder(folder)
    except ConfigError as error:
        yield warning("keys", str(error), "make new ones: cosmos keys new")
        return
    yield ok("keys", f"{folder.absolute()} has a controller's key, and lets others in")


def _size(number: float) -> str:
    return f"{number / _GIB:.1f} GiB"
