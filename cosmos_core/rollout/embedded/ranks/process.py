"""The first rank's end of another rank: its process, its socket, its end."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Final, Protocol

import attrs

from cosmos_core.errors import EngineLostError
from cosmos_core.rollout.embedded.ranks.messages import FROM_RANK, TO_RANK
from cosmos_core.rollout.workers.frames import Unframer, frame

_MODULE: Final = "cosmos_core.rollout.embedded.ranks.follower"
_CHUNK: Final = 1 << 16
_SEND_S: Final = 300.0
"""How long a rank may not read: a step is waited for by every rank, so it reads before long."""


class Process(Protocol):
    """A process that was started."""

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code (minus the number of a signal); subprocess.TimeoutExpired if it has none in time."""
        ...

    def kill(self) -> None:
        """End it by force."""
        ...


def spawn(theirs: socket.socket) -> Process:
    """Start a rank that reads from one end of a socket."""
    command = [sys.executable, "-P", "-m", _MODULE, str(theirs.fileno())]
    return subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)


@attrs.frozen(kw_only=True)
class Ended:
    """How a rank ended, in words, and whether it was killed, so that nothing is known to be wrong with it."""

    how: str
    is_killed: bool


class RankProcess:
    """A rank after the first.

    Attributes:
        rank: Its number.
        socket: Where it answers.
    """

    def __init__(self, rank: int) -> None:
        self.rank: Final = rank
        self.socket, theirs = socket.socketpair()
        with theirs:
            self._process: Final = spawn(theirs)
        self.socket.settimeout(_SEND_S)
        self._unframer: Final = Unframer()

    def send(self, message: object, descriptor: int | None = None) -> None:
        """Tell it something, with a descriptor if there is one.

        Raises:
            EngineLostError: It has ended, or does not read.
        """
        framed = frame(TO_RANK.encode(message))
        try:
            if descriptor is None:
                self.socket.sendall(framed)
                return
            sent = socket.send_fds(self.socket, [framed], [descriptor])
            self.socket.sendall(framed[sent:])
        except OSError as error:
            raise EngineLostError(f"rank {self.rank} of the engine cannot be told what to do: {error}") from error

    def receive(self) -> Iterator[object]:
        """Each message that came; something can be read.

        Raises:
            EOFError: It has ended.
            TransportError: What came is no message.
        """
        try:
            data = self.socket.recv(_CHUNK)
        except ConnectionError:
            data = b""
        if not data:
            raise EOFError
        yield from map(FROM_RANK.decode, self._unframer.feed(data))

    def hang_up(self) -> None:
        """Let it see that there is nothing more to do. Idempotent."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def end(self, grace_s: float) -> Ended:
        """How it ended: by force, unless it has ended or does so within `grace_s`."""
        try:
            code = self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            return Ended(how="killed", is_killed=True)
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return Ended(how=how, is_killed=code < 0)
