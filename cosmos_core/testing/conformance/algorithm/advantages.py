"""Tests of what an algorithm makes of groups: which it admits, and the advantages of their samples."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import pytest

from cosmos_core.protocols import Algorithm, AlgorithmCapabilities, AlgorithmContext
from cosmos_core.testing.conformance.algorithm.calls import admitted, advantages_of, rewards_text
from cosmos_core.testing.conformance.algorithm.groups import sampled_group, sampled_groups
from cosmos_core.testing.conformance.algorithm.subject import AlgorithmSubject
from cosmos_core.testing.conformance.plugin import fault
from cosmos_core.types import Group


class AlgorithmAdvantages(AlgorithmSubject):
    """Whether advantages are there where they must be, and the same in every process."""

    @pytest.fixture
    def groups(self, capabilities: AlgorithmCapabilities, context: AlgorithmContext) -> Sequence[Group]:
        """A step's groups: ordinary rewards, equal ones, far and near ones, some of them unscored."""
        if capabilities.source == "demonstrations":
            pytest.skip("demonstrations are in no groups")
        return sampled_groups(capabilities, context)

    @pytest.fixture
    def estimator(self, algorithm: Algorithm, groups: Sequence[Group]) -> Algorithm:
        """The algorithm, if it gives advantages at all; what one test says need not be said by all."""
        try:
            _expect_values(algorithm, copy.deepcopy(groups))
        except pytest.fail.Exception:
            pytest.skip("no advantages: see test_scored_samples_have_a_finite_advantage_and_others_none")
        return algorithm

    def test_scored_samples_have_a_finite_advantage_and_others_none(
        self, algorithm: Algorithm, groups: Sequence[Group]
    ) -> None:
        """What could not be scored takes no part; it is never a zero."""
        _expect_values(algorithm, groups)

    def test_unscored_samples_take_no_part_in_their_group(
        self, estimator: Algorithm, groups: Sequence[Group], capabilities: AlgorithmCapabilities
    ) -> None:
        """A reward that failed says nothing of the other samples."""
        places = [
            place
            for place, group in enumerate(groups)
            if max(1, capabilities.min_group_size) <= len(_scored(group)) < len(group.samples)
        ]
        if not places:
            pytest.skip("min_group_size allows no unscored sample")
        for place in places:
            without = attrs.evolve(groups[place], samples=tuple(_scored(groups[place])))
            batch = [*groups[:place], without, *groups[place + 1 :]]
            seen = [value for value in advantages_of(estimator, groups)[place] if value is not None]
            expected = advantages_of(estimator, batch)[place]
            if not _close(seen, expected):
                fault(
                    f"the scored samples of a group with {rewards_text([groups[place]])} have advantages "
                    f"{_text(seen)}, and {_text(expected)} without its unscored samples; leave samples whose "
                    "is_scored is False out of every mean and deviation, never count them as 0"
                )

    def test_an_unscored_sample_is_no_zero(
        self, estimator: Algorithm, capabilities: AlgorithmCapabilities, context: AlgorithmContext
    ) -> None:
        """A reward that failed on a hard prompt must not pass for a bad answer, nor for a good one."""
        size = context.group_size
        if capabilities.source == "demonstrations" or size <= max(1, capabilities.min_group_size):
            pytest.skip("no sample can be unscored")

        def of_the_others(sign: float, first: float | None) -> list[float | None]:
            rewards = [first, *[sign * (1.0 + index / size) for index in range(1, size)]]
            return advantages_of(estimator, [sampled_group(0, rewards, longest=context.max_units)])[0][1:]

        signs = (1.0, -1.0)
        matters = any(not _close(of_the_others(sign, 0.0), of_the_others(sign, 3.0 * sign)) for sign in signs)
        if matters and all(_close(of_the_others(sign, None), of_the_others(sign, 0.0)) for sign in signs):
            fault(
                "an unscored sample changes the advantages of its group as a reward of 0 does; take means over the "
                "samples whose is_scored is True, and divide by their number, not by the group's size"
            )

    def test_a_failed_sample_is_unscored_even_with_a_number(
        self, estimator: Algorithm, groups: Sequence[Group]
    ) -> None:
        """What counts is `Sample.is_scored`."""
        numbered = [
            attrs.evolve(
                group,
                samples=tuple(
                    sample if sample.is_scored else attrs.evolve(sample, reward=5.0) for sample in group.samples
                ),
            )
            for group in groups
        ]
        if advantages_of(estimator, numbered) != advantages_of(estimator, groups):
            fault(
                "advantages change with the reward of a sample whose status is reward_failed or reward_timeout; look "
                "at sample.is_scored, not at whether sample.reward is None"
            )

    def test_every_replica_computes_the_same_advantages(
        self, make: Callable[..., Any], estimator: Algorithm, groups: Sequence[Group]
    ) -> None:
        """Each works them out for itself from the same groups; a difference would be trained on."""
        first = advantages_of(estimator, groups)
        advantages_of(estimator, groups[::-1])
        if advantages_of(estimator, groups) != first:
            fault("advantages of the same groups differ at a second call; they must depend on nothing but `groups`")
        if advantages_of(make(), groups) != first:
            fault("two instances give different advantages to the same groups; draw no random numbers, keep no state")

    def test_groups_are_read_never_written(self, estimator: Algorithm, groups: Sequence[Group]) -> None:
        """The same records are reported afterwards."""
        before = copy.deepcopy(groups)
        advantages_of(estimator, groups)
        for group in groups:
            admitted(estimator, group)
        if groups != before:
            fault("advantages or admit changed the groups that they were given; work on a copy")

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


def _expect_values(algorithm: Algorithm, groups: Sequence[Group]) -> None:
    for group, values in zip(groups, advantages_of(algorithm, groups), strict=True):
        where = f"in a group with {rewards_text([group])}"
        for sample, value in zip(group.samples, values, strict=True):
            if not sample.is_scored and value is not None:
                fault(f"advantages gave {value!r} to an unscored sample {where}; give None")
            if sample.is_scored and not _is_finite(value):
                fault(f"advantages gave {value!r} to a scored sample {where}; give a finite float")


def _scored(group: Group) -> list[Any]:
    return [sample for sample in group.samples if sample.is_scored]


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _close(seen: Sequence[float | None], expected: Sequence[float | None]) -> bool:
    return len(seen) == len(expected) and all(
        first is not None and second is not None and math.isclose(first, second, rel_tol=1e-6, abs_tol=1e-9)
        for first, second in zip(seen, expected, strict=True)
    )


def _text(values: Sequence[float | None]) -> str:
    return ", ".join("None" if value is None else f"{value:g}" for value in values)
