"""A process group of a publisher and a receiver, outside torch's default group; it lasts for one fetch.

gloo passes tensors in CPU memory over TCP. NCCL passes tensors in GPU memory; it has no tags, so both sides name their
transfers in the same order, and it needs a GPU for each of the two processes. Its communicator is built in the first
transfer, in which the lower rank of the two names it to the other: a receive waits until the other one sends. So a pair
begins with a byte from the publisher, while both are there.

Whatever fails is a `TransportError` with torch's own words: the other one does not appear or is gone, a transfer is not
complete in time, or the GPU has no room.
"""

from __future__ import annotations

import contextlib
import ctypes
import re
import socket
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroupGloo, TCPStore  # type: ignore[attr-defined]

from cosmos_core.errors import TransportError
from cosmos_core.weights.wire import REQUEST_SLICES, Backend

PUBLISHER: Final = 0
RECEIVER: Final = 1

_GIVE_UP: Final = timedelta(milliseconds=1)
_PAUSE_S: Final = 0.0005
_GREETING: Final = 0
"""Tag of the byte that a pair begins with; requests count from 1."""
_TAGS: Final = 1 << 31
_PLACE: Final = re.compile(r"^\[[^\]]+:\d+\] ")


class Rendezvous:
    """Where the two meet, on the publisher's side: a store of torch's, on a free port of an address of this machine."""

    def __init__(self, host: str, timeout_s: float) -> None:
        with _told(f"nobody can be met at {host}"):
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            # Left to itself, torch listens on every address of the machine.
            listening = socket.create_server((host, 0), family=family)
            self.port: Final = int(listening.getsockname()[1])
            self.store: Final = TCPStore(
                host,
                self.port,
                None,
                is_master=True,
                timeout=timedelta(seconds=timeout_s),
                wait_for_workers=False,
                master_listen_fd=listening.detach(),
            )


def meet(host: str, port: int, timeout_s: float) -> TCPStore:
    """The store of a publisher's `Rendezvous`."""
    with _told(f"{host}:{port} cannot be met"):
        timeout = timedelta(seconds=timeout_s)
        return TCPStore(host, port, None, is_master=False, timeout=timeout, wait_for_workers=False)


class Pair:
    """Passes tensors of bytes, on `device`, to the other one; used by one thread.

    `host` is the address of this machine for the connection; the other one must appear in `timeout_s`.
    """

    def __init__(self, kind: Backend, store: TCPStore, rank: int, *, host: str, timeout_s: float) -> None:
        self.kind: Final = kind
        self.device: Final = torch.device("cpu") if kind == "gloo" else _gpu()
        self._peer: Final = 1 - rank
        self._group: Any = None
        with _told(f"no {kind} connection"):
            self._group = _gloo(store, rank, host, timeout_s) if kind == "gloo" else _nccl(store, rank, timeout_s)
        if kind == "nccl":
            self._greet(rank, timeout_s)

    def placed(self, data: torch.Tensor) -> torch.Tensor:
        """Bytes of this process where they can be sent from."""
        with _told(f"{data.numel():,} bytes cannot be put on {self.device}"):
            return data.to(self.device)

    def room(self, size: int) -> torch.Tensor:
        """Memory for bytes that come."""
        with _told(f"no room for {size:,} bytes on {self.device}"):
            return torch.empty(size, dtype=torch.uint8, device=self.device)

    def send(self, data: torch.Tensor, tag: int) -> dist.Work:
        """Begin to send bytes, which must stay as they are until it is finished."""
        with _told(f"a transfer over {self.kind} failed"):
            work: dist.Work = self._group.send([data], self._peer, tag)
        return work

    def receive(self, data: torch.Tensor, tag: int) -> dist.Work:
        """Begin to write what comes under a tag into `data`."""
        with _told(f"a transfer over {self.kind} failed"):
            work: dist.Work = self._group.recv([data], self._peer, tag)
        return work

    def finish(self, work: dist.Work, timeout_s: float) -> None:
        """Wait for one transfer. If it fails the pair is of no use any more, and the other one hears of it."""
        with _told(f"a transfer over {self.kind} failed"):
            if self.kind == "gloo":
                # Transfers of two cannot be polled; one that is waited for in vain closes the connection (measured).
                work.wait(timedelta(seconds=timeout_s))
            else:
                self._poll(work, timeout_s)

    def drop(self, pending: list[dist.Work]) -> None:
        """Leave, whatever is under way; the pair is of no use any more."""
        group, self._group = self._group, None
        if not pending or group is None:
            return
        if self.kind == "nccl":
            # A kernel that waits for a lost peer never ends; a group with one must not be destroyed either.
            group.abort()
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
            return
        for work in pending:
            # The first one closes the connection, which ends the others.
            with contextlib.suppress(RuntimeError):
                work.wait(_GIVE_UP)

    def _greet(self, rank: int, timeout_s: float) -> None:
        """Have the communicator built, from both sides at the same time."""
        byte = self.room(1)
        work = self.send(byte, _GREETING) if rank == PUBLISHER else self.receive(byte, _GREETING)
        try:
            self.finish(work, timeout_s)
        except TransportError:
            self.drop([work])
            raise

    def _poll(self, work: dist.Work, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not work.is_completed():
            if time.monotonic() > deadline:
                raise TransportError(f"a transfer over {self.kind} was not complete after {timeout_s:g} s")
            time.sleep(_PAUSE_S)
        work.wait()


def _gloo(store: TCPStore, rank: int, host: str, timeout_s: float) -> Any:
    options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # noqa: SLF001 - as torch itself makes them
    options._devices = [ProcessGroupGloo.create_device(hostname=host)]  # noqa: SLF001
    options._timeout = timedelta(seconds=timeout_s)  # noqa: SLF001
    return ProcessGroupGloo(store, rank, 2, options)


def _nccl(store: TCPStore, rank: int, timeout_s: float) -> Any:
    # Who builds a communicator waits for the other one without a limit: neither shall begin before both are there.
    store.set(f"here-{rank}", "")
    store.wait([f"here-{1 - rank}"], timedelta(seconds=timeout_s))
    # The watchdog's own limit stays far off: it would end the process. `Pair.finish` gives up much earlier.
    return dist.ProcessGroupNCCL(store, rank, 2, dist.ProcessGroupNCCL.Options())


def _gpu() -> torch.device:
    """This thread's GPU: the first that the process sees, of which `cosmos run` shows each its own."""
    if not torch.cuda.is_available() or not dist.is_nccl_available():
        raise TransportError(
            "nccl needs a CUDA device and torch's NCCL in both processes, and this one lacks them; "
            "set sync.transport to 'gloo' or 'auto'"
        )
    return torch.device("cuda", torch.cuda.current_device())


@contextlib.contextmanager
def _told(what: str) -> Iterator[None]:
    """Say what failed, and torch's reason."""
    try:
        yield
    except (OSError, RuntimeError, ValueError) as error:  # what torch raises on every kind of failure
        line = str(error).strip().partition("\n")[0]
        # gloo says where in its sources first, and what users of its own should do last.
        reason = _PLACE.sub("", line).partition(". This is")[0] or type(error).__name__
        raise TransportError(f"{what}: {reason}") from error


def tag_of(request: int, index: int) -> int:
    """The tag of slice `index` of an answer; both sides number them alike."""
    return (request * REQUEST_SLICES + index) % _TAGS
