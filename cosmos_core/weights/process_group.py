"""Brings slices from a publisher to a receiver: as frames, or through a process group of the two.

Requests and answers always travel over ZeroMQ, so that the planner, the window, deadlines and the turn to other
publishers are the same for every transport. The process group is outside torch's default group.

gloo passes tensors in CPU memory over TCP. NCCL passes tensors in GPU memory, from which they are taken into the
machine's as they come: a GPU holds the answers that are on their way (`wire.WINDOW` a publisher), and no second copy of
the weights. NCCL has no tags, so both sides name their transfers in the same order, and it needs a GPU for each of the
two processes. A pair that has done all that it was asked for stays for later fetches, until one of the two leaves it or
ends; a receiver tells the publisher so through the store in which they met.

Whatever fails is a `TransportError` with torch's own words: the other one does not appear or is gone, a transfer is not
complete in time, or the GPU has no room.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import os
import queue
import re
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from datetime import timedelta
from functools import partial
from typing import Any, Final, TypeAlias

import torch
import torch.distributed as dist
import zmq
from torch.distributed import ProcessGroupGloo, Store, TCPStore  # type: ignore[attr-defined]

from cosmos_core.errors import TransportError
from cosmos_core.threads import begin
from cosmos_core.transport.addresses import address_towards
from cosmos_core.weights.staging import cuda, download
from cosmos_core.weights.wire import REQUEST_SLICES, Backend

FORM_S: Final = 30.0
"""Longest wait for a connection once both are there: a receiver connects with one of its publishers after another."""
SEND_S: Final = 30.0
"""Longest wait for a receiver to take a slice; one that takes longer is given up."""
IDLE_S: Final = 330.0
"""How long a receiver may not appear, or ask for nothing, before it counts as gone: longer than a fetch may take."""

_LOGGER: Final = logging.getLogger(__name__)
_Answer: TypeAlias = tuple[int, Sequence[memoryview]]

PUBLISHER: Final = 0
RECEIVER: Final = 1

_GIVE_UP: Final = timedelta(milliseconds=1)
_PAUSE_S: Final = 0.0005
_ANSWER_S: Final = 1.0
_MEET_S: Final = 0.01
_LOOK_S: Final = 2.0
"""How often a publisher that has nothing to send looks whether the receiver has left."""
_CAME: Final = "the receiver is there"
_LEFT: Final = "the receiver has left"
_TAGS: Final = 1 << 31
_PLACE: Final = re.compile(r"^\[[^\]]+:\d+\] ")


def rendezvous(host: str, timeout_s: float) -> TCPStore:
    """The publisher's store, in which it meets a receiver: on a free `port` of an address of this machine."""
    with _told(f"nobody can be met at {host}"):
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        # Left to itself, torch listens on every address of the machine.
        listening = socket.create_server((host, 0), family=family)
        port, timeout = int(listening.getsockname()[1]), timedelta(seconds=timeout_s)
        file = listening.detach()
        return TCPStore(
            host, port, None, is_master=True, timeout=timeout, wait_for_workers=False, master_listen_fd=file
        )


def meet(host: str, port: int, timeout_s: float) -> TCPStore:
    """Connect to a publisher's store (`rendezvous`).

    The store waits for the answer to its first word without a limit, so it is made on a thread of its own.
    """
    timeout = timedelta(seconds=timeout_s)
    connect = partial(TCPStore, host, port, None, is_master=False, timeout=timeout, wait_for_workers=False)
    made = begin(connect, "rendezvous")
    with _told(f"{host}:{port} cannot be met"):
        wait([made], timeout_s + _ANSWER_S)
        if not made.done():
            raise RuntimeError(f"it does not answer within {timeout_s + _ANSWER_S:g} s")
        return made.result()


class Pair:
    """A process group of two that passes tensors of bytes, on `device`; used by one thread.

    `host` is the address of this machine for the connection; the other process must appear in `timeout_s`.
    """

    def __init__(self, kind: Backend, store: TCPStore, rank: int, *, host: str, timeout_s: float) -> None:
        self.kind: Final = kind
        self.device: Final = torch.device("cpu") if kind == "gloo" else _gpu()
        # Beside the process's other work, for which nothing waits: what is sent lies complete in the machine's memory.
        self._stream: Final = cuda.Stream(self.device) if kind == "nccl" else None
        self._peer: Final = 1 - rank
        self._group: Any = None
        with _told(f"no {kind} connection"):
            if kind == "gloo":
                self._group = _gloo(store, rank, host, timeout_s)
            else:
                self._group = nccl_group(store, rank, 2, self.device, timeout_s)

    def placed(self, data: torch.Tensor) -> torch.Tensor:
        """Put bytes of this process on the device that sends them."""
        with self._doing(f"{data.numel():,} bytes cannot be put on {self.device}"):
            return data.to(self.device)

    def room(self, size: int) -> torch.Tensor:
        """Allocate memory for bytes to be received."""
        with self._doing(f"no room for {size:,} bytes on {self.device}"):
            return torch.empty(size, dtype=torch.uint8, device=self.device)

    def taken(self, received: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Take what was received into the memory of this machine."""
        with self._doing(f"{sum(map(len, received)):,} bytes cannot be taken from {self.device}"):
            return received if self.kind == "gloo" else download(received)

    def send(self, data: torch.Tensor, tag: int) -> dist.Work:
        """Begin to send bytes, which must stay as they are until it is finished."""
        with self._doing(f"a transfer over {self.kind} failed"):
            work: dist.Work = self._group.send([data], self._peer, tag)
        return work

    def receive(self, data: torch.Tensor, tag: int) -> dist.Work:
        """Begin to write what comes under a tag into `data`."""
        with self._doing(f"a transfer over {self.kind} failed"):
            work: dist.Work = self._group.recv([data], self._peer, tag)
        return work

    def finish(self, work: dist.Work, timeout_s: float) -> None:
        """Wait for one transfer. If it fails the pair is of no use any more, and the other one hears of it."""
        with self._doing(f"a transfer over {self.kind} failed"):
            if self.kind == "gloo":
                # Transfers of two cannot be polled; one that is waited for in vain closes the connection (measured).
                work.wait(timedelta(seconds=timeout_s))
            else:
                self._poll(work, timeout_s)

    def drop(self, pending: list[dist.Work]) -> None:
        """Leave, whatever is under way; the pair is of no use any more."""
        group, self._group = self._group, None
        if self.kind == "nccl" and group is not None:
            # Without `shutdown`: that waits for the other one, if it is on the same machine, to leave, too.
            group.abort()
            if pending:
                # A kernel that waits for a lost peer never ends; a group with one must not be destroyed either.
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
            return
        for work in pending:
            # The first one closes the connection, which ends the others.
            with contextlib.suppress(RuntimeError):
                work.wait(_GIVE_UP)

    @contextlib.contextmanager
    def _doing(self, failure: str) -> Iterator[None]:
        with _told(failure), contextlib.nullcontext() if self._stream is None else cuda.stream(self._stream):
            yield

    def _poll(self, work: dist.Work, timeout_s: float) -> None:
        deadline, pause_s = time.monotonic() + timeout_s, 0.0

        def pause() -> None:
            nonlocal pause_s
            if time.monotonic() > deadline:
                raise TransportError(f"a transfer over {self.kind} was not complete after {timeout_s:g} s")
            # Between GPUs of one machine a slice takes some ten microseconds.
            time.sleep(pause_s)
            pause_s = min(_PAUSE_S, pause_s + _PAUSE_S / 50)

        finish(work, self._group, self._stream, pause)


def _gloo(store: TCPStore, rank: int, host: str, timeout_s: float) -> Any:
    options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # noqa: SLF001 - as torch itself makes them
    options._devices = [ProcessGroupGloo.create_device(hostname=host)]  # noqa: SLF001
    options._timeout = timedelta(seconds=timeout_s)  # noqa: SLF001
    return ProcessGroupGloo(store, rank, 2, options)


LIMIT_S: Final = 1800.0
"""Gloo, or NCCL's watchdog, gives a collective up after it, as a last resort. Whoever waits gives up much earlier."""
_HANDLING: Final = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_SPARING: Final = "2"
"""The watchdog ends the communicator of a collective that failed; by torch's default it ends the process. The groups of
a policy replica's own processes keep what is set, or the default: they live and die together."""
_making: Final = threading.Lock()


def nccl_group(store: Store, rank: int, size: int, device: torch.device, timeout_s: float) -> Any:
    """Make a group of NCCL that its members outlive; all of them call it.

    They have to appear in `timeout_s`, and then have that long, or `FORM_S`, to build the communicator.

    Raises:
        RuntimeError: One did not, or is lost meanwhile.
    """
    # Who builds a communicator waits for the others without a limit: nobody shall begin before all are there.
    store.set(f"here-{rank}", "")
    store.wait([f"here-{each}" for each in range(size)], timedelta(seconds=timeout_s))
    options: Any = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=LIMIT_S)  # noqa: SLF001 - the options have no public setter
    # A group reads it once, as it is made; other groups of this process and those of its children are not ours.
    with _making:
        if (given := os.environ.get(_HANDLING)) not in (None, _SPARING):
            message = "%s=%s would end this process with another one: between replicas it is %s all the same"
            _LOGGER.warning(message, _HANDLING, given, _SPARING)
        os.environ[_HANDLING] = _SPARING
        try:
            group = dist.ProcessGroupNCCL(store, rank, size, options)
        finally:
            del os.environ[_HANDLING]
            if given is not None:
                os.environ[_HANDLING] = given
    # Nothing interrupts it: if a member is lost now, a thread is left behind, and with it the group.
    built = begin(partial(group.eager_connect_single_device, device), "communicator")
    wait([built], limit_s := max(timeout_s, FORM_S))
    if not built.done():
        raise RuntimeError(f"NCCL's communicator of {size} was not built in {limit_s:g} s: a member is lost")
    built.result()
    return group


@functools.cache
def aside(device: torch.device) -> Any:
    """The stream on which this process waits for gradients; None of a CPU.

    torch hands its 32 streams of a priority out again and again. Of this priority few are taken, so that this one is
    not that of a checkpoint's copies, too.
    """
    return None if device.type == "cpu" else cuda.Stream(device, priority=-1)


def finish(work: dist.Work, group: Any, stream: Any, pause: Callable[[], None]) -> None:
    """Wait for a work by polling: nothing else can be interrupted when the other side dies (measured).

    NCCL calls a work complete as soon as this thread's look finds an error, and the group tells of the error only once
    its watchdog has found it, too. The kernel does not end before that, so it is waited for, and then the group asked.
    `pause` is called between two looks, and may raise. Raises RuntimeError if the work failed.

    `stream` is for what the group transfers: what is computed on it would be waited for, and would wait for what hangs.
    It is None of a CPU.
    """
    while not work.is_completed():
        pause()
    if stream is None:
        work.wait()
        return
    with cuda.stream(stream):
        work.wait()
    done = stream.record_event()
    while not done.query():
        pause()
    if (error := group.get_error()).name != "SUCCESS":
        raise RuntimeError(f"NCCL has given the group up: {error.name}")


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
    """Raise torch's errors in the body as a TransportError that says what failed, and torch's reason."""
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


class FrameTransport:
    """Brings the slices of one publisher, which follow its answer on the same socket."""

    def expect(self, request: int, sizes: Sequence[int]) -> None:
        """Make ready for an answer, before it is asked for; `sizes` are the bytes of its slices."""

    def take(self, request: int, frames: Sequence[zmq.Frame]) -> list[torch.Tensor]:  # noqa: ARG002
        """The slices of an answer that has come, as bytes; `frames` came with it, and theirs is the memory."""
        return [
            torch.frombuffer(frame.buffer, dtype=torch.uint8) if len(frame) else torch.empty(0, dtype=torch.uint8)
            for frame in frames
        ]

    def close(self) -> None:
        """Leave; what is expected does not come any more."""


class ProcessGroupTransport(FrameTransport):
    """Brings slices through a process group with the publisher, which waits at `host` and `port` for this receiver.

    Transfers are begun before they are asked for, so that those of several publishers go on at the same time.
    """

    def __init__(self, kind: Backend, host: str, port: int, stall_s: float, name: str = "") -> None:
        self._store: Final = meet(host, port, stall_s)
        with _told(f"{host}:{port} cannot be met"):
            self._store.set(_CAME, "")
        self.name: Final = name
        self.stall_s = stall_s
        self._pair: Final = Pair(kind, self._store, RECEIVER, host=address_towards(host), timeout_s=stall_s)
        self._expected: Final[dict[int, list[tuple[torch.Tensor, dist.Work | None]]]] = {}
        self._failure: TransportError | None = None

    @property
    def is_idle(self) -> bool:
        """True while all that was expected has come, so that another fetch may go on with it."""
        return self._failure is None and not self._expected

    def expect(self, request: int, sizes: Sequence[int]) -> None:
        """Begin to receive; if the connection is broken, or the GPU is full, `take` tells."""
        expected = self._expected.setdefault(request, [])
        try:
            for index, size in enumerate(sizes):
                data = self._pair.room(size)
                expected.append((data, self._pair.receive(data, tag_of(request, index)) if size else None))
        except TransportError as error:
            self._failure = error

    def take(self, request: int, frames: Sequence[zmq.Frame]) -> list[torch.Tensor]:
        """Wait until all slices of the answer are there, and return them."""
        if frames:
            raise TransportError(f"{len(frames)} slices as frames, and {self._pair.kind} was agreed")
        if self._failure is not None:
            raise self._failure
        for _, work in self._expected[request]:
            if work is not None:
                self._pair.finish(work, self.stall_s)
        return [*self._pair.taken([data for data, _ in self._expected.pop(request)])]

    def close(self) -> None:
        """Leave, whatever is under way, and tell the publisher if it is still there."""
        with contextlib.suppress(RuntimeError):
            self._store.set(_LEFT, "")
        self._pair.drop([work for each in self._expected.values() for _, work in each if work is not None])
        self._expected.clear()


class Sender:
    """Sends answers to one receiver, met at `port`. The server that feeds it never waits for it.

    Attributes:
        name: Names the pair to the receiver, in a later fetch.
        receiver: The receiver's own name; empty for none.
        is_kept: True between the receiver's fetches.
    """

    def __init__(self, kind: Backend, host: str, receiver: str = "") -> None:
        self.receiver: Final = receiver
        self._kind: Final[Backend] = kind
        self._host: Final = host
        store = rendezvous(host, FORM_S)
        self.port: Final = store.port
        self.name: Final = uuid.uuid4().hex
        self.is_kept = False
        self._answers: Final[queue.SimpleQueue[_Answer | None]] = queue.SimpleQueue()
        self._is_closing: Final = threading.Event()
        self._lock: Final = threading.Lock()
        self._why_ended = ""
        self._thread: Final = threading.Thread(target=self._run, args=(store,), name=f"weights-{kind}", daemon=True)
        self._thread.start()

    @property
    def is_over(self) -> bool:
        """True once the sender sends nothing any more."""
        return not self._thread.is_alive()

    def send(self, request: int, slices: Sequence[memoryview]) -> None:
        """Queue the slices that answer a request; their memory must stay as it is until they are sent."""
        with self._lock:
            if self._why_ended:
                raise TransportError(self._why_ended)
            self._answers.put((request, slices))

    def renew(self) -> bool:
        """Go on with another fetch of the same receiver; false if it sends nothing any more."""
        with self._lock:
            self.is_kept = False
            self._answers.put((0, ()))  # what counts as silence begins here
            return not self._why_ended

    def close(self) -> None:
        """End once what is queued is sent; returns at once. Idempotent."""
        self._is_closing.set()
        self._answers.put(None)

    def join(self, timeout_s: float) -> None:
        """Wait for the end; a receiver that does not take what it asked for cannot hold it up for longer."""
        self._thread.join(timeout_s)

    def _run(self, store: TCPStore) -> None:
        try:
            self._await(store)
            pair = Pair(self._kind, store, PUBLISHER, host=self._host, timeout_s=FORM_S)
            try:
                while (answer := self._next(store)) is not None:
                    _send(pair, *answer)
            finally:
                pair.drop([])
        except TransportError as error:
            _LOGGER.warning("a receiver of weights over %s was given up: %s", self._kind, error)
            with self._lock:
                self._why_ended = f"the connection over {self._kind} was given up: {error}"

    def _await(self, store: Store) -> None:
        deadline = time.monotonic() + IDLE_S
        with _told("the store in which they meet failed"):
            while not store.check([_CAME]):
                if self._is_closing.wait(_MEET_S) or time.monotonic() > deadline:
                    raise TransportError(f"the receiver has left, or did not appear in {IDLE_S:g} s")

    def _next(self, store: Store) -> _Answer | None:
        """The next answer to send; None at the end."""
        deadline = time.monotonic() + IDLE_S
        while True:
            with contextlib.suppress(queue.Empty):
                return self._answers.get(timeout=min(_LOOK_S, IDLE_S))
            with _told("the store in which they met failed"):
                has_left = store.check([_LEFT])
            if not has_left and time.monotonic() < deadline:
                continue
            with self._lock:
                if not self._answers.empty():
                    return self._answers.get()
                idle = f"it was asked for nothing over {self._kind} for {IDLE_S:g} s"
                self._why_ended = _LEFT if has_left else idle
            _LOGGER.info("a receiver of weights over %s is gone: %s", self._kind, self._why_ended)
            return None


def _send(pair: Pair, request: int, slices: Sequence[memoryview]) -> None:
    works = []
    try:
        for index, data in enumerate(slices):
            if len(data):
                content = pair.placed(torch.frombuffer(data, dtype=torch.uint8))
                # Held until it is sent.
                works.append((pair.send(content, tag_of(request, index)), content))
        while works:
            pair.finish(works[0][0], SEND_S)
            works.pop(0)
    except TransportError:
        pair.drop([work for work, _ in works])
        raise
