"""The replica's end of one worker process: its start, its socket, its end."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

from cosmos_core.rollout.workers.frames import Unframer, frame

_CHUNK = 1 << 16


class WorkerLine:
    """A process that was given one end of a socket.

    Args:
        module: What it runs, as `python -m`; the descriptor of its end is the argument.
        first: The first message to it.
    """

    def __init__(self, module: str, first: bytes) -> None:
        self.socket, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-P", "-m", module, str(theirs.fileno())]
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        self.socket.setblocking(False)
        self._unframer = Unframer()
        self._unsent = bytearray(frame(first))

    @property
    def wants_write(self) -> bool:
        """Whether something waits to be sent."""
        return bool(self._unsent)

    def put(self, framed: bytes) -> None:
        """Send a frame, or what the socket takes of it now."""
        self._unsent += framed
        self.send()

    def send(self) -> None:
        """Send what the socket takes now."""
        try:
            sent = self.socket.send(self._unsent)
        except BlockingIOError:
            return
        except ConnectionError:
            sent = len(self._unsent)  # the end of the stream says what happened
        del self._unsent[:sent]

    def receive(self) -> Iterator[bytes]:
        """Yield each message that came.

        Raises:
            EOFError: The worker has ended.
            TransportError: What came is no message.
        """
        try:
            data = self.socket.recv(_CHUNK)
        except BlockingIOError:
            return
        except ConnectionError:
            data = b""
        if not data:
            raise EOFError
        yield from self._unframer.feed(data)

    def end(self, grace_s: float) -> str:
        """End it, by force unless it has ended or does so within `grace_s`; how it ended, in words."""
        try:
            code = self._process.wait(grace_s)
            how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            how = "killed"
        self.socket.close()
        return how
