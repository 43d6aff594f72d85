"""Scores as a run gets them: from worker processes, each under its time limit."""

from __future__ import annotations

import contextlib
import functools
import queue
import uuid
from collections.abc import Iterator, Sequence
from typing import Final

import attrs
import psutil
import pytest

from cosmos_core.config.schema import RewardConfig
from cosmos_core.errors import CosmosError
from cosmos_core.protocols import Completion
from cosmos_core.rollout.reward_pool import Outcome, Outcomes, RewardPool
from cosmos_core.testing.conformance.plugin import fault
from cosmos_core.types import SampleStatus

_MARK: Final = "COSMOS_CONFORMANCE_RUN"
_CHECK_S: Final = 0.2
_LEAVE_S: Final = 3.0


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
    mark = uuid.uuid4().hex
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(_MARK, mark)
        patch.setenv("PYTHONHASHSEED", hash_seed)
        pool = RewardPool([reward], num_workers=1, seed=seed)
        with contextlib.closing(pool):
            pool.start()
            found = dict(_outcomes(pool, completions))
    outcomes = tuple(found.get(index) for index in range(len(completions)))
    return WorkerRun(outcomes=outcomes, leftovers=tuple(_end_leftovers(mark)))


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


def _end_leftovers(mark: str) -> list[str]:
    """End what a worker started and did not end, found by the mark in its environment."""
    _, alive = psutil.wait_procs([each for each in psutil.process_iter() if _carries(each, mark)], timeout=_LEAVE_S)
    names = []
    for process in alive:
        with contextlib.suppress(psutil.Error):
            names.append(" ".join(process.cmdline()) or process.name())
            process.kill()
    return names


def _carries(process: psutil.Process, mark: str) -> bool:
    try:
        return process.environ().get(_MARK) == mark and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
