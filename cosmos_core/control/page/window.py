"""The controller's side of the page: what it shows, how often, and what people ask for there.

Everything here is done by the controller's thread, between two turns; it takes at most a twentieth of its time.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Callable, Iterator
from typing import Final
from urllib.parse import urlsplit

import attrs

from cosmos_core.config.job import Job, Stage, stages
from cosmos_core.control.live.event_feed import EventFeed
from cosmos_core.control.live.figures import Gauges, Timeline
from cosmos_core.control.live.snapshot import take
from cosmos_core.control.machine.events import Event
from cosmos_core.control.machine.state import State
from cosmos_core.control.page.board import Board
from cosmos_core.errors import TransportError
from cosmos_core.transport.messages import Answer, Command

PAGE: Final = bytes(256)
"""Who asks where people ask at the page: longer than any identity that a socket can have."""

_LOG: Final = logging.getLogger(__name__)
_INTERVAL_S: Final = 0.5
_MOST_SHARE: Final = 0.05


class Window:
    """Shows a run on a board, and takes from it what people ask for."""

    def __init__(self, board: Board, stages: tuple[Stage, ...], name: str) -> None:
        self._board: Final = board
        self._stages: Final = stages
        self._name: Final = name
        self._feed: Final = EventFeed()
        self._timeline = Timeline()
        self._due = float("-inf")

    def go_on_from(self, timeline: Timeline) -> None:
        """Begin with what the journal told of the time before this controller; changed from now on."""
        self._timeline = timeline

    def note(self, state: State, event: Event) -> None:
        """Take an event in, as soon as the state has."""
        now = time.time()
        self._timeline.take(now, event, state)
        self._feed.note(event, now)

    def asked(self, run_id: str) -> Iterator[Command]:
        """The requests of people since this was called last."""
        for asked in self._board.take_asked():
            _LOG.info("asked at the page (request %s)", asked.ident)
            yield Command(run_id=run_id, ident=asked.ident, request=asked.request)

    def answer(self, message: object) -> None:
        """Pass on what the controller says to `PAGE`."""
        if isinstance(message, Answer):
            self._board.answer(message.ident, message.refusal)

    def show(self, state: State, gauges: Callable[[], Gauges], now: float, *, is_last: bool = False) -> None:
        """Show the run as it is now, if it is time for that or the end; `now` is monotonic."""
        if now < self._due and not is_last:
            return
        began = time.perf_counter()
        snapshot = take(state, self._feed, self._timeline, self._stages, gauges(), name=self._name, now=time.time())
        self._board.offer(snapshot)
        # Of a run of thousands a snapshot takes longer, so there are fewer of them.
        self._due = now + max(_INTERVAL_S, (time.perf_counter() - began) / _MOST_SHARE)


@attrs.frozen(kw_only=True)
class Opened:
    """The outcome of opening a page; its announcement is for `controller.json`."""

    window: Window | None = None
    announcement: dict[str, str] = attrs.field(factory=dict)


@contextlib.contextmanager
def opened(job: Job) -> Iterator[Opened]:
    """A run's page while its controller serves it; a run goes on without a page that cannot be opened."""
    if job.recipe.control.page_port < 0:
        yield Opened()
        return
    from cosmos_core.control.page.service import Page  # noqa: PLC0415 - only a controller with a page needs aiohttp

    control = job.recipe.control
    try:
        page = Page(job.directory, control.page_bind, control.page_port, preferred=_earlier_port(job))
    except TransportError as error:
        _LOG.warning("the run goes on without its page: %s", error)
        yield Opened(announcement={"page_problem": str(error)})
        return
    page.start()
    try:
        _LOG.info("the page is at %s", page.address)
        announcement = {"page": page.address, "page_token": str(page.token_file)}
        yield Opened(window=Window(page.board, stages(job.recipe), job.recipe.run.name), announcement=announcement)
    finally:
        page.close()


def _earlier_port(job: Job) -> int:
    """The port of the controller before this one, so that browsers find the page again; 0 if there was none."""
    try:
        found = json.loads((job.directory / "controller.json").read_text(encoding="utf-8"))
        return urlsplit(str(found["page"])).port or 0
    except (OSError, ValueError, KeyError, TypeError):
        return 0
