"""What rewards return: numbers, the same ones for the same completion, and nothing else is touched."""

from __future__ import annotations

import math
import numbers
import random
from collections.abc import Sequence
from typing import Any

import pytest

from cosmos_core.protocols import Completion, Reward, RewardCapabilities, Score
from cosmos_core.testing.conformance.plain_json import json_problems
from cosmos_core.testing.conformance.plugin import fault
from cosmos_core.testing.conformance.reward.completions import shown
from cosmos_core.testing.conformance.reward.plan import refusals
from cosmos_core.testing.conformance.reward.scoring import Judged, judge
from cosmos_core.testing.conformance.reward.subject import RewardSubject, ScoreInWorker
from cosmos_core.testing.conformance.reward.workers import WorkerRun

_UNDECLARED = "a_kind_that_is_not_declared"
_TOLERANCE = 1e-6


class RewardValues(RewardSubject):
    """What a score is."""

    def test_a_score_is_a_number(self, judged: list[Judged]) -> None:
        """Statistics and advantages are computed from it."""
        for each in judged:
            value = each.value
            if isinstance(value, bool) or not isinstance(value, numbers.Real) or not math.isfinite(value):
                kind = type(value).__name__
                fault(f"{shown(each.completion)} scored {value!r:.100}, a {kind}; return a finite float or a Score")

    def test_details_are_plain_json(self, judged: list[Judged]) -> None:
        """They are shown in other processes."""
        for each in judged:
            if isinstance(each.outcome, Score):
                for problem in json_problems(dict(each.outcome.details), "details"):
                    fault(f"{shown(each.completion)}: {problem}")

    def test_it_changes_nothing_that_it_is_given(self, judged: list[Judged]) -> None:
        """Other rewards and samples of the group see the same prompt."""
        for each in judged:
            if each.changed:
                fault(f"scoring changed the prompt, payload or media of {shown(each.completion)}; work on a copy")

    def test_the_same_completion_gets_the_same_score(
        self, capabilities: RewardCapabilities, judged: list[Judged], reward: Reward, completions: Sequence[Completion]
    ) -> None:
        """Whatever was scored before it, and by whichever instance."""
        _needs_determinism(capabilities)
        again = judge(reward, [*completions, *reversed(completions)])
        last = len(again) - 1
        for index, completion in enumerate(completions):
            seen = (judged[index].value, again[index].value, again[last - index].value)
            if len(set(seen)) > 1:
                fault(_differs(completion, seen, "by one instance, by another, and by that one again in another order"))

    def test_another_process_gives_the_same_score(
        self,
        capabilities: RewardCapabilities,
        sound_run: WorkerRun,
        in_worker: ScoreInWorker,
        completions: Sequence[Completion],
    ) -> None:
        """Each replica has workers of its own, and a score must not depend on which of them gave it."""
        _needs_determinism(capabilities)
        order = random.Random(0).sample(range(len(completions)), len(completions))  # noqa: S311 - no secret
        run = in_worker([completions[index] for index in order], hash_seed="1")
        for index, outcome in zip(order, run.outcomes, strict=True):
            first = sound_run.outcomes[index]
            seen = tuple(None if each is None else each.value for each in (first, outcome))
            if len(set(seen)) > 1:
                fault(_differs(completions[index], seen, "in one process, and in another with another hash seed"))

    def test_the_examples_get_their_scores(self, reward: Reward) -> None:
        """What its documentation promises."""
        if not self.examples:
            pytest.skip("not given: `examples`, completions with the scores that they must get")
        found = judge(reward, [completion for completion, _ in self.examples])
        for each, (completion, expected) in zip(found, self.examples, strict=True):
            if not math.isclose(each.value, expected, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE):
                fault(f"{shown(completion)} scored {each.value}, and `examples` says {expected}")

    def test_only_declared_payload_kinds_are_planned(self, capabilities: RewardCapabilities) -> None:
        """A recipe with an engine that makes other payloads is refused before it starts."""
        kinds: Any = capabilities.payload_kinds
        if not isinstance(kinds, frozenset) or not kinds or not all(isinstance(kind, str) for kind in kinds):
            fault(f"payload_kinds is {kinds!r}; declare what it scores, such as frozenset({{'tokens'}})")
        for kind in sorted(kinds):
            for refusal in refusals(self.plugin, capabilities, {kind}):
                fault(f"it declares payloads of kind {kind!r}, but planning refuses it: {refusal}")
        if not refusals(self.plugin, capabilities, {_UNDECLARED}):
            fault(f"planning accepts it beside an engine of payloads {_UNDECLARED!r}: a fault of cosmos-core")


def _needs_determinism(capabilities: RewardCapabilities) -> None:
    if not capabilities.deterministic:
        pytest.skip("not declared: deterministic")


def _differs(completion: Completion, seen: Sequence[Any], where: str) -> str:
    return (
        f"{shown(completion)} scored {', '.join(map(str, seen))}: {where}; compute it from the completion alone "
        "(no state, no hash(), no order of a set), or declare RewardCapabilities(deterministic=False)"
    )
