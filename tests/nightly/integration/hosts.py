"""Several hosts on this machine, joined by a switch: each has an address, name, shared memory and processes of its own.

A host is a set of namespaces that a process holds open. This process ends with the one that made it, whatever becomes
of that, and with it the host: its processes, its mounts, and its cables.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Final

import psutil

PROGRAMS: Final = ("ip", "unshare", "nsenter", "mount", "hostname", "sh", "cat")
_START_S: Final = 10.0
_COMMAND_S: Final = 60.0
_FLAGS: Final = ("--net", "--mount", "--uts", "--ipc", "--pid")
# The first process of a host: adopts orphans, and ends once nobody holds the other end of its input.
_INIT: Final = "exec 3<&0; cat <&3 >/dev/null & wait $!"
_SET_UP: Final = (
    "hostname {name} && mount -t tmpfs tmpfs /dev/shm && mount --bind {names} /etc/hosts && ip link set lo up"
)


def lacking() -> str:
    """Why there can be no hosts here; empty if there can."""
    absent = [program for program in PROGRAMS if shutil.which(program) is None]
    if absent:
        return f"no {', '.join(absent)}: apt-get install iproute2 util-linux"
    cables = "ip link add one type veth peer name two && ip link add three type bridge && mount -t tmpfs tmpfs /dev/shm"
    tried = _tried(["unshare", *_FLAGS, "--fork", "sh", "-c", cables])
    return f"no namespaces can be made: {tried.stderr.strip()}" if tried.returncode else ""


class Host:
    """One host, not connected yet.

    Attributes:
        name: Its name, which means loopback to itself, as on many machines, and nothing to others.
        address: Its address on the network.
        pid: Its first process, as this machine numbers it.
    """

    def __init__(self, name: str, address: str, folder: Path) -> None:
        self.name: Final = name
        self.address: Final = address
        self._holder: Final = subprocess.Popen(
            ["unshare", *_FLAGS, "--fork", "--kill-child", "--mount-proc", "sh", "-c", _INIT], stdin=subprocess.PIPE
        )
        self.pid: Final = self._first_process()
        names = folder / name
        names.write_text(f"127.0.0.1 localhost\n127.0.1.1 {name}\n", encoding="ascii")
        self("sh", "-c", _SET_UP.format(name=name, names=names))

    def command(self, *words: str, folder: Path = Path("/")) -> list[str]:
        """A command of this machine that runs another one on the host, in a folder."""
        return ["nsenter", f"--target={self.pid}", *_FLAGS, f"--wdns={folder}", "--", *words]

    def __call__(self, *words: str) -> str:
        """Output of a command on the host, which must succeed."""
        done = _tried(self.command(*words))
        assert done.returncode == 0, (self.name, words, done.stdout, done.stderr)
        return done.stdout

    @contextlib.contextmanager
    def network(self) -> Iterator[None]:
        """Let this thread, and those that it starts, make their connections from the host."""
        with Path("/proc/thread-self/ns/net").open("rb") as here, Path(f"/proc/{self.pid}/ns/net").open("rb") as there:
            _enter(there.fileno())
            try:
                yield
            finally:
                _enter(here.fileno())

    def close(self) -> None:
        """Power it off."""
        _end(self._holder)

    def _first_process(self) -> int:
        deadline = time.monotonic() + _START_S
        while not (found := psutil.Process(self._holder.pid).children()):
            assert time.monotonic() < deadline, f"{self.name} does not start"
            time.sleep(0.01)
        return found[0].pid


class Network:
    """Hosts that reach one another through a switch.

    Args:
        hosts: Switched on.
    """

    def __init__(self, hosts: Sequence[Host]) -> None:
        self._hosts: Final = {host.name: host for host in hosts}
        self._switch: Final = subprocess.Popen(["unshare", "--net", "cat"], stdin=subprocess.PIPE)
        deadline = time.monotonic() + _START_S
        while _space_of(self._switch.pid) in {"", _space_of(os.getpid())}:
            assert time.monotonic() < deadline, "the switch does not start"
            time.sleep(0.01)

    def __getitem__(self, name: str) -> Host:
        return self._hosts[name]

    def connect(self) -> None:
        """Lay a cable to each host."""
        self._on_switch("link", "add", "switch", "type", "bridge")
        self._on_switch("link", "set", "switch", "up")
        for host in self._hosts.values():
            ends = ("link", "add", f"to-{host.name}", "type", "veth", "peer", "name", "eth0")
            self._on_switch(*ends, "netns", str(host.pid))
            self._on_switch("link", "set", f"to-{host.name}", "master", "switch", "up")
            host("ip", "address", "add", f"{host.address}/24", "dev", "eth0")
            host("ip", "link", "set", "eth0", "up")

    def cut(self, name: str) -> None:
        """Pull the cable of a host: nothing that is sent arrives, and nobody is told."""
        self._on_switch("link", "set", f"to-{name}", "down")

    def mend(self, name: str) -> None:
        """Put it back."""
        self._on_switch("link", "set", f"to-{name}", "up")

    @property
    def spaces(self) -> set[str]:
        """What tells the network namespaces apart."""
        return {_space_of(pid) for pid in (self._switch.pid, *(host.pid for host in self._hosts.values()))}

    def close(self) -> None:
        """Power the switch off."""
        _end(self._switch)

    def _on_switch(self, *words: str) -> None:
        done = _tried(["nsenter", f"--target={self._switch.pid}", "--net", "ip", *words])
        assert done.returncode == 0, (words, done.stderr)


@contextlib.contextmanager
def network(folder: Path, *names: str) -> Iterator[Network]:
    """Hosts of these names, at 10.77.0.1 and on; in the end they are powered off, and nothing is left of them.

    Args:
        folder: For their files; made.
        names: Of the hosts.
    """
    folder.mkdir()
    spaces: set[str] = set()
    with contextlib.ExitStack() as stack:
        hosts = []
        for number, name in enumerate(names, start=1):
            hosts.append(Host(name, f"10.77.0.{number}", folder))
            stack.callback(hosts[-1].close)
        found = Network(hosts)
        stack.callback(found.close)
        found.connect()
        spaces = found.spaces
        yield found
    deadline = time.monotonic() + _START_S
    while left := _inhabitants(spaces):
        assert time.monotonic() < deadline, f"processes left behind: {left}"
        time.sleep(0.05)


def _inhabitants(spaces: Collection[str]) -> list[psutil.Process]:
    return [process for process in psutil.process_iter() if _space_of(process.pid) in spaces]


def _space_of(pid: int) -> str:
    """The network namespace of a process; empty if it is gone."""
    try:
        return str(Path(f"/proc/{pid}/ns/net").readlink())
    except OSError:
        return ""


def _enter(namespace: int) -> None:
    if ctypes.CDLL(None, use_errno=True).setns(namespace, 0):
        raise OSError(ctypes.get_errno(), "setns")


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    assert process.stdin is not None, "it was made with one"
    process.stdin.close()


def _tried(words: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        words, capture_output=True, text=True, timeout=_COMMAND_S, check=False, stdin=subprocess.DEVNULL
    )
