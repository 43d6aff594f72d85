"""One scorer of a service: its worker processes, what it still owes, and its restarts.

A worker that hangs or dies is replaced by its pool, and what it scored is a failure. A pool that itself cannot go on,
since a worker does not start again, fails what it owes and is made anew after a pause.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from cosmos_core.errors import CosmosError
from cosmos_core.protocols import Completion
from cosmos_core.rollout.rewards.messages import Outcome, Outcomes
from cosmos_core.rollout.rewards.pool import RewardPool
from cosmos_core.types import SampleStatus
from cosmos_service_reward_service.settings import ScorerSettings

_LOG: Final = logging.getLogger(__name__)
_CHECK_S: Final = 0.1
_FIRST_PAUSE_S: Final = 1.0
_LONGEST_PAUSE_S: Final = 60.0


class Scorer:
    """A reward plugin in processes of its own. All methods are called on the service's event loop.

    Args:
        settings: What it is.
    """

    def __init__(self, settings: ScorerSettings) -> None:
        self.name: Final = settings.label
        self._settings: Final = settings
        self._owed: Final[dict[int, Callable[[Outcome], None]]] = {}
        self._next = 0
        self._pool = self._make()
        self._fault = ""
        self._num_pools = 1
        self._earlier = (0.0, 0)
        self._counts: Final[dict[SampleStatus, int]] = dict.fromkeys(
            (SampleStatus.OK, SampleStatus.REWARD_FAILED, SampleStatus.REWARD_TIMEOUT), 0
        )

    @property
    def fault(self) -> str:
        """The reason why it scores nothing at the moment; empty if it does."""
        return self._fault

    @property
    def counts(self) -> dict[SampleStatus, int]:
        """Completions by what became of them."""
        return self._counts

    @property
    def num_owed(self) -> int:
        """Completions that are being scored or wait for it."""
        return len(self._owed)

    @property
    def num_restarts(self) -> int:
        """Worker processes that were started again."""
        return self._earlier[1] + self._pool.num_replaced + self._num_pools - 1

    @property
    def scoring_s(self) -> float:
        """Seconds that scores took."""
        return self._earlier[0] + self._pool.scoring_s

    def start(self) -> None:
        """Start the processes; returns at once."""
        self._pool.start()

    async def ready(self) -> None:
        """Return once the plugin is loaded in each process.

        Raises:
            CosmosError: It cannot be loaded.
        """
        while not self._pool.is_ready:
            await asyncio.sleep(_CHECK_S)
            self._pool.check()

    def score(self, completion: Completion, done: Callable[[Outcome], None]) -> None:
        """Score a completion; `done` is called on the event loop, once, whatever happens."""
        if self._fault:
            detail = f"{self.name}: down: {self._fault}"
            self._settle(done, Outcome(value=None, status=SampleStatus.REWARD_FAILED, detail=detail))
            return
        self._next += 1
        number, loop = self._next, asyncio.get_running_loop()
        self._owed[number] = done

        def answer(outcomes: Outcomes) -> None:
            loop.call_soon_threadsafe(self._answered, number, outcomes[0][0])

        self._pool.submit([completion], answer)

    async def supervise(self) -> None:
        """Look after the pool until cancelled."""
        pause_s = _FIRST_PAUSE_S
        while True:
            await asyncio.sleep(_CHECK_S)
            try:
                self._pool.check()
            except CosmosError as error:
                await self._replace(str(error), pause_s)
                pause_s = min(_LONGEST_PAUSE_S, 2.0 * pause_s)
            else:
                if self._fault and self._pool.is_ready:
                    _LOG.warning("scorer %s: up again", self.name)
                    self._fault, pause_s = "", _FIRST_PAUSE_S

    async def close(self) -> None:
        """End the processes; what is owed fails."""
        self._fault = "the service was stopped"
        await asyncio.to_thread(self._pool.close)
        self._fail_all(f"{self.name}: {self._fault}")

    def _make(self) -> RewardPool:
        settings = self._settings
        return RewardPool([settings.reward], num_workers=settings.workers, seed=settings.seed, lasts=True)

    async def _replace(self, fault: str, pause_s: float) -> None:
        self._fault = fault
        _LOG.error("scorer %s is down, and is started again in %g s: %s", self.name, pause_s, fault)
        self._fail_all(f"{self.name}: {fault}")
        await asyncio.to_thread(self._pool.close)
        self._earlier = (self.scoring_s, self._earlier[1] + self._pool.num_replaced)
        self._pool = self._make()
        self._num_pools += 1
        await asyncio.sleep(pause_s)
        self._pool.start()

    def _fail_all(self, detail: str) -> None:
        for number in list(self._owed):
            self._answered(number, Outcome(value=None, status=SampleStatus.REWARD_FAILED, detail=detail))

    def _answered(self, number: int, outcome: Outcome) -> None:
        done = self._owed.pop(number, None)
        if done is not None:
            self._settle(done, outcome)

    def _settle(self, done: Callable[[Outcome], None], outcome: Outcome) -> None:
        self._counts[outcome.status] += 1
        done(outcome)
