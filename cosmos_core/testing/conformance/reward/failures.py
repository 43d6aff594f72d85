"""Rewards in the workers of a run: they score what is ordinary, in time, and what fails fails alone."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import Any

import attrs
import pytest

from cosmos_core.protocols import Completion, Reward, RewardCapabilities
from cosmos_core.testing.conformance.plugin import fault
from cosmos_core.testing.conformance.reward.completions import shown
from cosmos_core.testing.conformance.reward.scoring import Judged, attempt, cancel, number
from cosmos_core.testing.conformance.reward.subject import RewardSubject, ScoreInWorker
from cosmos_core.testing.conformance.reward.workers import WorkerRun
from cosmos_core.types import SampleStatus

_SHOWN = 3


class RewardFailures(RewardSubject):
    """What may fail, and how."""

    def test_every_ordinary_completion_gets_a_score(
        self, worker_run: WorkerRun, completions: Sequence[Completion]
    ) -> None:
        """A wrong, empty or garbled answer is scored low; raising is for what cannot be judged at all."""
        failed = [
            f"{shown(completion)}: {outcome.detail}"
            for completion, outcome in zip(completions, worker_run.outcomes, strict=True)
            if outcome is not None and outcome.status is SampleStatus.REWARD_FAILED
        ]
        if failed:
            fault(_listed(f"{len(failed)} of {len(completions)} ordinary completions got no score", failed))

    def test_it_answers_in_time(self, worker_run: WorkerRun, completions: Sequence[Completion]) -> None:
        """A run waits `timeout_s` of the recipe for a score, then ends the worker and drops the sample."""
        for completion, outcome in zip(completions, worker_run.outcomes, strict=True):
            if outcome is not None and outcome.status is SampleStatus.REWARD_TIMEOUT:
                fault(
                    f"{shown(completion)} got no score within {self.timeout_s:g} s; make `score` quicker, "
                    "or set `timeout_s` of the test class to what recipes must give it"
                )

    def test_it_leaves_no_process_behind(self, worker_run: WorkerRun) -> None:
        """A worker may be ended at any time, and what it started must not outlive it."""
        if worker_run.leftovers:
            fault(_listed("`score` starts processes that outlive the worker; wait for them", worker_run.leftovers))

    def test_a_coroutine_can_be_cancelled(self, reward: Reward, judged: list[Judged]) -> None:
        """One that takes too long is cancelled, so that the worker can go on with the others."""
        ending = next((cancel(reward, each.completion) for each in judged if each.awaited), None)
        if ending is None:
            pytest.skip("`score` is no coroutine")
        if ending in ("goes on", "hangs"):
            fault("`score` goes on after it is cancelled; let asyncio.CancelledError through")

    def test_what_cannot_be_scored_raises(self, reward: Reward) -> None:
        """A made-up number would train the model on the mistake."""
        self._needs_unscorable()
        for completion in self.unscorable:
            error = attempt(reward, completion)
            if not isinstance(error, Exception):
                fault(f"{shown(completion)} cannot be scored, but `score` returned; raise an error that says why")
            if not str(error).strip():
                fault(f"{shown(completion)} raised {error!r} without a message; say why it cannot be scored")

    def test_no_score_is_made_up_without_a_reference(self, capabilities: RewardCapabilities, reward: Reward) -> None:
        """A dataset whose rows lack the reference would train the model on whatever `score` falls back to."""
        referring = [(each, score) for each, score in self.examples if each.prompt.reference is not None]
        if not referring:
            pytest.skip("not given: `examples` whose prompts have a reference")
        if self.reference_is_optional or not capabilities.deterministic:
            pytest.skip("declared: a score may be another one without the reference")
        for completion, score in referring:
            bare = attrs.evolve(completion, prompt=attrs.evolve(completion.prompt, reference=None))
            value = number(attempt(reward, bare))
            if _is_another(value, score):
                fault(
                    f"{shown(completion)} scores {score}, and {value} when its prompt has no reference: a number that "
                    "is made up; raise an error that says why and list such a completion in `unscorable`, or set "
                    "`reference_is_optional = True` if the reward judges answers without a reference on purpose"
                )

    def test_what_was_not_rendered_raises(
        self, capabilities: RewardCapabilities, reward: Reward, completions: Sequence[Completion]
    ) -> None:
        """An engine that renders nothing gives pictures no score, and certainly not that of a black one."""
        if "media" not in capabilities.payload_kinds or completions[0].media is None:
            pytest.skip("not declared: payloads of kind media, or not looked at")
        bare = attrs.evolve(completions[0], payload=None, media=None)
        error = attempt(reward, bare)
        if not isinstance(error, Exception):
            fault(f"{shown(bare)} has no frames, but `score` returned {number(error)}; raise an error that says so")
        if not str(error).strip():
            fault(f"{shown(bare)} has no frames, and raised {error!r} without a message; say so")

    def test_a_failure_costs_its_own_sample_alone(
        self, in_worker: ScoreInWorker, sound_run: WorkerRun, completions: Sequence[Completion]
    ) -> None:
        """The sample gets a status with the reward's message; those beside it get their scores."""
        self._needs_unscorable()
        run = in_worker([*self.unscorable, completions[0]])
        for completion, outcome in zip(self.unscorable, run.outcomes, strict=False):
            if outcome is None or outcome.status is not SampleStatus.REWARD_FAILED:
                fault(f"{shown(completion)} must end as reward_failed, and ended as {outcome}")
        beside, alone = run.outcomes[-1], sound_run.outcomes[0]
        if beside is None or alone is None or beside.status is not SampleStatus.OK:
            fault(f"{shown(completions[0])} got a score alone, but after failures: {beside}; keep no state of them")

    def _needs_unscorable(self) -> None:
        if not self.unscorable:
            pytest.skip("not given: `unscorable`, completions for which `score` must raise")


def _is_another(value: Any, score: float) -> bool:
    """Whether it is a finite number, and not this score."""
    return isinstance(value, numbers.Real) and math.isfinite(value) and not math.isclose(value, score, abs_tol=1e-6)


def _listed(what: str, items: Sequence[str]) -> str:
    more = f"\n  and {len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
    return f"{what}:" + "".join(f"\n  {item}" for item in items[:_SHOWN]) + more
