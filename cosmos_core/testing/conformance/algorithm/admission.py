"""Tests of which groups an algorithm admits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from cosmos_core.protocols import Algorithm, AlgorithmContext
from cosmos_core.testing.conformance.algorithm.calls import admitted, advantages_of, rewards_text
from cosmos_core.testing.conformance.algorithm.groups import sampled_group
from cosmos_core.testing.conformance.algorithm.subject import AlgorithmSubject
from cosmos_core.testing.conformance.plugin import fault
from cosmos_core.types import Group


class AlgorithmAdmission(AlgorithmSubject):
    """Whether groups are refused for a reason, and something is left to train on."""

    def test_a_group_is_admitted_or_refused_with_a_reason(
        self, algorithm: Algorithm, groups: Sequence[Group], context: AlgorithmContext
    ) -> None:
        """The run counts refused groups by their reason. Groups without any reward are asked about, too."""
        unscored = sampled_group(len(groups), [None] * context.group_size, longest=context.max_units)
        for group in (*groups, unscored):
            answer: object = admitted(algorithm, group)
            if answer is not None and not (isinstance(answer, str) and answer):
                fault(
                    f"admit returned {answer!r} for a group with {rewards_text([group])}; return None to train on it, "
                    "or a short reason to drop it, such as 'equal rewards'"
                )

    def test_admission_depends_on_the_group_alone(
        self, make: Callable[..., Any], algorithm: Algorithm, groups: Sequence[Group]
    ) -> None:
        """Groups finish in any order, on any replica."""
        forward = [admitted(algorithm, group) for group in groups]
        backward = [admitted(algorithm, group) for group in reversed(groups)][::-1]
        other = make()
        elsewhere = [admitted(other, group) for group in reversed(groups)][::-1]
        for group, *answers in zip(groups, forward, backward, elsewhere, strict=True):
            if len(set(answers)) > 1:
                fault(
                    f"admit said {' and '.join(sorted(map(repr, set(answers))))} of one group with "
                    f"{rewards_text([group])}; judge a group by itself, keep no state and draw no random numbers"
                )

    def test_something_is_left_to_train_on(self, algorithm: Algorithm, groups: Sequence[Group]) -> None:
        """A run in which every group is refused, or moves nothing, never ends or never learns."""
        answers = [admitted(algorithm, group) for group in groups]
        kept = [group for group, answer in zip(groups, answers, strict=True) if answer is None]
        if not kept:
            fault(
                f"admit refuses every group, for example one with {rewards_text(groups[:1])}: {answers[0]!r}; return "
                "None for the groups to train on, or override the fixture `groups` with such as it admits"
            )
        if self.rewards_order_advantages and not any(any(values) for values in advantages_of(algorithm, kept)):
            fault(
                f"every advantage is 0, though rewards differ ({rewards_text(kept)}): nothing would be learnt; compute "
                "advantages from sample.reward"
            )
