"""Completions that are scored together: what arrives within moments of each other goes through as one batch."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final, Generic, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


class Batcher(Generic[Item, Result]):
    """Gathers single items into batches, for rewards whose `score` is a coroutine.

    `run` returns as many results as items, in the same order; the first item of a batch waits `wait_s` for others.
    """

    def __init__(
        self, run: Callable[[Sequence[Item]], Awaitable[Sequence[Result]]], *, size: int, wait_s: float
    ) -> None:
        self._run: Final = run
        self._size: Final = size
        self._wait_s: Final = wait_s
        self._waiting: dict[asyncio.Future[Result], Item] = {}
        self._running: Final[set[asyncio.Task[None]]] = set()

    async def put(self, item: Item) -> Result:
        """The item's result, once its batch is done; cancelling it costs the others of the batch nothing.

        Raises:
            Exception: What `run` raised, for every item of the batch.
        """
        loop = asyncio.get_running_loop()
        # What is left of a loop that ended would wait for ever.
        self._waiting = self._unanswered()
        result: asyncio.Future[Result] = loop.create_future()
        self._waiting[result] = item
        if len(self._waiting) >= self._size:
            self._begin()
        elif len(self._waiting) == 1:
            loop.call_later(self._wait_s, self._begin)
        return await result

    def _unanswered(self) -> dict[asyncio.Future[Result], Item]:
        return {result: item for result, item in self._waiting.items() if not result.done()}

    def _begin(self) -> None:
        batch, self._waiting = self._unanswered(), {}
        if batch:
            task = asyncio.ensure_future(self._finish(batch))
            self._running.add(task)
            task.add_done_callback(self._running.discard)
            # A call that hangs must not hold up the next batch once nobody waits for it.
            for each in batch:
                each.add_done_callback(
                    lambda result: result.cancelled() and all(one.done() for one in batch) and task.cancel()
                )

    async def _finish(self, batch: Mapping[asyncio.Future[Result], Item]) -> None:
        try:
            answers = list(zip(batch, await self._run([*batch.values()]), strict=True))
        except Exception as error:  # noqa: BLE001 - every item is told, and raises it where it is awaited
            for each in batch:
                if not each.done():
                    each.set_exception(error)
            return
        for each, result in answers:
            if not each.done():
                each.set_result(result)
