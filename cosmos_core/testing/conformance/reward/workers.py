"""Scores as a run gets them: from worker processes, each under its time limit."""

from __future__ import annotations

import contextlib
import functools
import queue
from collections.abc import Iterator, Sequence
from typing import Final

import attrs

from cosmos_core.config.schema import RewardConfig
from cosmos_core.errors import CosmosError
from cosmos_core.protocols import Completion
from cosmos_core.rollout.rewards.pool import Outcome, Outcomes, RewardPool
from cosmos_core.testing.conformance.leftovers import marked
from cosmos_core.testing.conformance.plugin import fault
from cosmos_core.types import SampleStatus

_CHECK_S: Final = 0.2


@attrs.frozen(kw_only=True)
class WorkerRun:
    """What a worker made of some completions.

    Attributes:
        outcomes: Of each completion, in order; None for those that were not waited for after a timeout.
        leftovers: Command lines of the processes that outlived the worker.
    """

    outcomes: tuple[Outcome | None, ...]
    leftovers: tuple[str, ...]

    @property
    def is_sound(self) -> bool:
        """Whether every completion got a score and nothing is left."""
        return not self.leftovers and all(each is not None and each.value is not None for each in self.outcomes)


def score_in_worker(reward: RewardConfig, completions: Sequence[Completion], *, hash_seed: str, seed: int) -> WorkerRun:
    """Score completions in a worker process, until all are scored or one takes too long.

    Args:
        reward: The reward as a recipe has it.
        completions: What to score.
        hash_seed: `PYTHONHASHSEED` of the worker.
        seed: `run.seed`.
    """
    with marked(hash_seed) as worker, contextlib.closing(RewardPool([reward], num_workers=1, seed=seed)) as pool:
        pool.start()
        found = dict(_outcomes(pool, completions))
    outcomes = tuple(found.get(index) for index in range(len(completions)))
    return WorkerRun(outcomes=outcomes, leftovers=worker.leftovers)


def _outcomes(pool: RewardPool, completions: Sequence[Completion]) -> Iterator[tuple[int, Outcome]]:
    """(index, outcome) as they come."""
    answers: queue.SimpleQueue[tuple[int, Outcomes]] = queue.SimpleQueue()

    def answer(index: int, outcomes: Outcomes) -> None:
        answers.put((index, outcomes))

    for index, completion in enumerate(completions):
        pool.submit([completion], functools.partial(answer, index))
    num_open = len(completions)
    while num_open:
        try:
            index, ((outcome,),) = answers.get(timeout=_CHECK_S)
        except queue.Empty:
            _check(pool)
            continue
        num_open -= 1
        yield index, outcome
        # What hangs once may hang at every completion, and each would take its time.
        if outcome.status is SampleStatus.REWARD_TIMEOUT:
            return


def _check(pool: RewardPool) -> None:
    try:
        pool.check()
    except CosmosError as error:
        fault(f"a worker process could not load the reward: {error}")
