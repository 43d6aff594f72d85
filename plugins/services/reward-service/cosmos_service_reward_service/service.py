"""A service without its HTTP: it takes requests on, has them scored, and keeps what came of them."""

from __future__ import annotations

import asyncio
import functools
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Final

import attrs

from cosmos_core.rollout.rewards.messages import Outcome
from cosmos_service_reward_service.bodies import Submission
from cosmos_service_reward_service.capacity import Capacity
from cosmos_service_reward_service.ledger import Entry, Ledger
from cosmos_service_reward_service.metrics import Figures, exposition
from cosmos_service_reward_service.scorers import Scorer
from cosmos_service_reward_service.settings import ServiceSettings


@attrs.define(eq=False)
class _Open:
    """A request that is being scored."""

    entry: Entry
    results: dict[str, list[Outcome | None]]
    num_open: int
    size_bytes: int


class Service:
    """Requests and their results. All methods are called on one event loop.

    Args:
        settings: The service's file.
        kinds: What each scorer scores (`kinds_of`).

    Attributes:
        settings: The service's file.
        kinds: What each scorer scores.
        capacity: What it has taken on.
        figures: What is counted.
        is_stopping: Whether it takes no more requests.
    """

    def __init__(self, settings: ServiceSettings, kinds: Mapping[str, frozenset[str]]) -> None:
        self.settings: Final = settings
        self.kinds: Final = kinds
        self.capacity: Final = Capacity(settings.queue, settings.queue_mb << 20)
        self.figures: Final = Figures()
        self.is_stopping = False
        self._ledger: Final = Ledger(keep_s=settings.keep_s, keep=settings.keep, forget_s=settings.forget_s)
        self._scorers: Final = {each.label: Scorer(each) for each in settings.scorer}
        self._idle: Final = asyncio.Event()
        self._idle.set()

    async def start(self) -> None:
        """Start the scorers, and wait until they are loaded.

        Raises:
            CosmosError: One cannot be loaded.
        """
        for each in self._scorers.values():
            each.start()
        for each in self._scorers.values():
            await each.ready()

    async def supervise(self) -> None:
        """Look after the scorers until cancelled."""
        async with asyncio.TaskGroup() as group:
            for each in self._scorers.values():
                group.create_task(each.supervise())

    async def close(self) -> None:
        """End the scorers; what is not scored fails."""
        for each in self._scorers.values():
            await each.close()

    def known(self, key: str) -> Entry | None:
        """The request that came with this idempotency key before; None if its result has expired."""
        return self._ledger.known(key, time.monotonic())

    def submit(self, submission: Submission, *, digest: str, key: str, size_bytes: int) -> Entry:
        """Have a request scored, whose size `capacity` has taken on, and whose key is not known."""
        entry = self._ledger.open(
            secrets.token_hex(16), digest=digest, key=key, about=submission.about, now=time.monotonic()
        )
        number = len(submission.completions)
        each_open: dict[str, list[Outcome | None]] = {name: [None] * number for name in submission.scorers}
        work = _Open(entry, each_open, number * len(each_open), size_bytes)
        self._idle.clear()
        for name in submission.scorers:
            for index, completion in enumerate(submission.completions):
                self._scorers[name].score(completion, functools.partial(self._scored, work, name, index))
        return entry

    async def find(self, ticket: str, wait_s: float) -> tuple[str, Entry | None]:
        """The state of a request, once it has results or `wait_s` have passed."""
        state, entry = self._ledger.find(ticket, time.monotonic())
        if state == "pending" and entry is not None and wait_s > 0.0:
            try:
                async with asyncio.timeout(wait_s):
                    await entry.finished.wait()
            except TimeoutError:
                pass
            # Held here: a result that expires meanwhile is still the answer to who waited for it.
            state = "pending" if entry.results is None else "done"
        return state, entry

    async def drained(self) -> None:
        """Return once nothing is being scored."""
        await self._idle.wait()

    def health(self) -> dict[str, object]:
        """The service's health, as JSON."""
        faults = {each.name: each.fault for each in self._scorers.values() if each.fault}
        status = "stopping" if self.is_stopping else "degraded" if faults else "ok"
        return {
            "status": status,
            "scorers": {name: "down" if name in faults else "up" for name in self._scorers},
            "pending": self._ledger.num_pending,
        }

    def metrics(self) -> str:
        """The figures of the service, as Prometheus reads them."""
        return exposition(self.figures, self._scorers.values(), self.capacity, self._ledger)

    def _scored(self, work: _Open, name: str, index: int, outcome: Outcome) -> None:
        work.results[name][index] = outcome
        work.num_open -= 1
        if work.num_open:
            return
        self.capacity.give(work.size_bytes)
        results = {each: _all(row) for each, row in work.results.items()}
        self._ledger.finish(work.entry, results, time.monotonic())
        self.figures.finish(work.entry.seconds)
        if not self._ledger.num_pending:
            self._idle.set()


def _all(row: Sequence[Outcome | None]) -> list[Outcome]:
    return [each for each in row if each is not None]
