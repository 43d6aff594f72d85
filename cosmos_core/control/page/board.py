"""The board between the controller and the page: the newest snapshot one way, what people ask the other.

Both ways are bounded: a snapshot that nobody took yet is replaced by the next, and only so much can be asked at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import secrets
from collections.abc import Callable, Iterator, Mapping
from typing import Final

import attrs
import msgspec

from cosmos_core.control.live.snapshot import Snapshot
from cosmos_core.control.machine.events import Commanded
from cosmos_core.errors import TransportError
from cosmos_core.transport.messages import REQUEST, Request

_ENCODER: Final = msgspec.json.Encoder()
_OWN_PARTS: Final = ("curves", "heldout", "samples", "news")
"""Fields that change seldom, or that are long."""

Parts = Mapping[str, bytes]
"""JSON by the name of the part; what has not changed is the very same object as before."""


def parts_of(snapshot: Snapshot, before: Parts) -> Parts:
    """The parts of a snapshot, from those of the one before."""
    rest = {
        field.name: getattr(snapshot, field.name) for field in attrs.fields(Snapshot) if field.name not in _OWN_PARTS
    }
    found = {name: _ENCODER.encode(getattr(snapshot, name)) for name in _OWN_PARTS} | {"run": _ENCODER.encode(rest)}
    return {name: before[name] if before.get(name) == data else data for name, data in found.items()}


def changes(parts: Parts, known: Parts) -> Iterator[tuple[str, bytes]]:
    """The parts that somebody who knows `known` lacks."""
    return ((name, data) for name, data in parts.items() if known.get(name) is not data)


def whole(parts: Parts) -> bytes:
    """All parts as one JSON object."""
    return b"{" + b",".join(b'"%s":%s' % (name.encode(), data) for name, data in parts.items()) + b"}"


def as_event(name: str, data: bytes) -> bytes:
    """A part as a server-sent event; JSON has no line breaks outside of its strings, and none unescaped in them."""
    return b"event: %s\ndata: %s\n\n" % (name.encode(), data)


_MOST_ASKED: Final = 16
_ANSWER_S: Final = 10.0


class Board:
    """Methods of the controller's thread: `offer`, `take_asked`, `answer`, `end`; all others are of the page's loop."""

    def __init__(self) -> None:
        self.parts: Parts = {}
        self.snapshot: Snapshot | None = None
        self.has_ended = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._changed = asyncio.Event()
        self._offered: Snapshot | None = None
        self._is_told = False
        self._is_over = False
        self._asked: Final[queue.SimpleQueue[Commanded]] = queue.SimpleQueue()
        self._answers: Final[dict[str, asyncio.Future[str]]] = {}

    # -- the controller's thread ---------------------------------------------------------------------------------------

    def offer(self, snapshot: Snapshot) -> None:
        """Show a snapshot from now on; never waits."""
        self._offered = snapshot
        if not self._is_told:
            self._is_told = True
            self._call(self._take_offered)

    def take_asked(self) -> list[Commanded]:
        """The requests since this was called last that are still waited for."""
        found: list[Commanded] = []
        with contextlib.suppress(queue.Empty):
            while True:
                found.append(self._asked.get_nowait())
        return [asked for asked in found if asked.ident in self._answers]

    def answer(self, ident: str, refusal: str) -> None:
        """Say what became of a request; empty if it was taken in."""
        self._call(self._settle, ident, refusal)

    def end(self) -> None:
        """Nothing more will be offered or taken."""
        self._is_over = True
        self._call(self._finish)

    # -- the page's loop -----------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Be used by the running loop; what was offered before is taken, and an end that came before is known."""
        self._loop = asyncio.get_running_loop()
        self._take_offered()
        if self._is_over:
            self._finish()

    async def changed(self, timeout_s: float) -> None:
        """Wait for a newer snapshot, or the end; returns after `timeout_s` in any case."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()

    async def ask(self, request: Request) -> str:
        """Ask the run for something; why it was refused, empty once it is in the journal."""
        if len(self._answers) >= _MOST_ASKED:
            raise TransportError(f"{_MOST_ASKED} requests wait for an answer; try again")
        ident = secrets.token_hex(8)
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._answers[ident] = answer
        self._asked.put(Commanded(ident=ident, request=REQUEST.encode(request)))
        try:
            async with asyncio.timeout(_ANSWER_S):
                return await answer
        except TimeoutError:
            raise TransportError(
                f"the controller has not answered within {_ANSWER_S:g} s; it may still do what was asked: look at the "
                "run before you ask again"
            ) from None
        finally:
            del self._answers[ident]

    def _call(self, function: Callable[..., None], *arguments: str) -> None:
        loop = self._loop
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has been closed: nobody looks any more
                loop.call_soon_threadsafe(function, *arguments)

    def _take_offered(self) -> None:
        self._is_told = False
        if self._offered is not None:
            self.snapshot = self._offered
            self.parts = parts_of(self._offered, self.parts)
            self._tell()

    def _settle(self, ident: str, refusal: str) -> None:
        answer = self._answers.get(ident)
        if answer is not None and not answer.done():
            answer.set_result(refusal)

    def _finish(self) -> None:
        self.has_ended = True
        self._tell()

    def _tell(self) -> None:
        """Wake everyone who waits; who comes later waits for the next."""
        self._changed.set()
        self._changed = asyncio.Event()
