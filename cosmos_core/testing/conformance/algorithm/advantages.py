"""Tests of the advantages that an algorithm gives to the samples of the groups that it admits."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import attrs
import pytest
import torch

from cosmos_core.protocols import Algorithm, AlgorithmCapabilities, AlgorithmContext
from cosmos_core.protocols.algorithm import Estimate, Estimating, Taken
from cosmos_core.testing.conformance.algorithm.calls import (
    Batch,
    admitted,
    advantages_of,
    estimates_of,
    expect_advantages,
    rewards_text,
    settled,
)
from cosmos_core.testing.conformance.algorithm.subject import AlgorithmSubject, sampled_group
from cosmos_core.testing.conformance.plugin import fault
from cosmos_core.types import Group

_ROUNDING: Final = 1e-5
"""Of an advantage, relative to the larger one, or to 1."""


class AlgorithmAdvantages(AlgorithmSubject):
    """Advantages are there where they must be, and the same in every process."""

    def test_scored_samples_have_a_finite_advantage_and_others_none(
        self, algorithm: Algorithm, kept: Sequence[Group]
    ) -> None:
        """A sample without a score takes no part; it is never a zero."""
        expect_advantages(algorithm, kept)

    def test_unscored_samples_take_no_part_in_their_group(
        self, estimator: Algorithm, kept: Sequence[Group], capabilities: AlgorithmCapabilities
    ) -> None:
        """A reward that failed says nothing of the other samples."""
        fewest = max(1, capabilities.min_group_size)
        shorter = {
            place: attrs.evolve(group, samples=tuple(_scored(group)))
            for place, group in enumerate(kept)
            if fewest <= len(_scored(group)) < len(group.samples)
        }
        shorter = {place: group for place, group in shorter.items() if admitted(estimator, group) is None}
        if not shorter:
            pytest.skip("min_group_size, or admit, allows no unscored sample")
        for place, without in shorter.items():
            batch = [*kept[:place], without, *kept[place + 1 :]]
            seen = [value for value in advantages_of(estimator, kept)[place] if value is not None]
            expected = advantages_of(estimator, batch)[place]
            if not _close(seen, expected):
                fault(
                    f"the scored samples of a group with {rewards_text([kept[place]])} have advantages "
                    f"{_text(seen)}, and {_text(expected)} without its unscored samples; leave samples whose "
                    "is_scored is False out of every mean and deviation, never count them as 0"
                )

    def test_an_unscored_sample_is_no_zero(
        self, estimator: Algorithm, capabilities: AlgorithmCapabilities, context: AlgorithmContext
    ) -> None:
        """A reward that failed on a hard prompt must not pass for a bad answer, nor for a good one."""
        size = context.group_size
        if capabilities.source != "rollouts" or size <= max(1, capabilities.min_group_size):
            pytest.skip("no sample can be unscored")

        def others(sign: float, first: float | None) -> Group:
            rewards = [first, *[sign * (1.0 + index / size) for index in range(1, size)]]
            return sampled_group(0, rewards, longest=context.max_units)

        matters, as_zero = False, True
        for sign in (1.0, -1.0):
            compared = [others(sign, first) for first in (None, 0.0, 3.0 * sign)]
            if any(admitted(estimator, group) is not None for group in compared):
                continue
            unscored, zero, far = (advantages_of(estimator, [group])[0][1:] for group in compared)
            matters |= not _close(zero, far)
            as_zero &= _close(unscored, zero)
        if matters and as_zero:
            fault(
                "an unscored sample changes the advantages of its group as a reward of 0 does; take means over the "
                "samples whose is_scored is True, and divide by their number, not by the group's size"
            )

    def test_a_failed_sample_is_unscored_even_with_a_number(self, estimator: Algorithm, kept: Sequence[Group]) -> None:
        """Only `Sample.is_scored` counts."""
        numbered = [
            attrs.evolve(
                group,
                samples=tuple(
                    sample if sample.is_scored else attrs.evolve(sample, reward=5.0) for sample in group.samples
                ),
            )
            for group in kept
        ]
        if any(admitted(estimator, group) is not None for group in numbered):
            fault(
                "admit refuses a group for the reward of a sample whose status is reward_failed or reward_timeout; "
                "look at sample.is_scored, not at whether sample.reward is None"
            )
        if advantages_of(estimator, numbered) != advantages_of(estimator, kept):
            fault(
                "advantages change with the reward of a sample whose status is reward_failed or reward_timeout; look "
                "at sample.is_scored, not at whether sample.reward is None"
            )

    def test_a_higher_reward_never_lowers_the_advantage_of_its_sample(
        self, estimator: Algorithm, kept: Sequence[Group], capabilities: AlgorithmCapabilities
    ) -> None:
        """Advantages are all that a policy learns of its rewards; in some group a higher reward must show."""
        if not capabilities.needs_rewards:
            pytest.skip("needs_rewards is False")
        if not self.rewards_order_advantages:
            pytest.skip("rewards_order_advantages is False")
        shows = False
        for group in kept:
            for place, raised in _raised(estimator, group):
                before, after = (_advantage(estimator, each, place) for each in (group, raised))
                difference = (after - before) / max(1.0, abs(before), abs(after))
                if difference < -_ROUNDING:
                    fault(
                        f"a sample of a group with {rewards_text([group])} has an advantage of {before:g}, and of "
                        f"{after:g} once its own reward is {raised.samples[place].reward:g}; is the sign wrong? Set "
                        "rewards_order_advantages = False in the test class if it is meant"
                    )
                shows |= difference > _ROUNDING
        if not shows:
            fault(
                "no sample's advantage rises with its own reward, in any group; compute advantages from "
                "sample.reward, or set rewards_order_advantages = False in the test class if they come from elsewhere"
            )

    def test_every_replica_computes_the_same_advantages(
        self, make: Callable[..., Any], estimator: Algorithm, kept: Sequence[Group]
    ) -> None:
        """Each works them out for itself from the same groups; a difference would be trained on."""
        first = advantages_of(estimator, kept)
        advantages_of(estimator, kept[::-1])
        if advantages_of(estimator, kept) != first:
            fault("advantages of the same groups differ at a second call; they must depend on nothing but `groups`")
        if advantages_of(make(), kept) != first:
            fault("two instances give different advantages to the same groups; draw no random numbers, keep no state")

    def test_groups_are_read_never_written(self, estimator: Algorithm, kept: Sequence[Group]) -> None:
        """The same records are reported afterwards."""
        before = copy.deepcopy(kept)
        advantages_of(estimator, kept)
        for group in kept:
            admitted(estimator, group)
        if kept != before:
            fault("advantages or admit changed the groups that they were given; work on a copy")


def _raised(algorithm: Algorithm, group: Group) -> Iterator[tuple[int, Group]]:
    """(sample, the group with a higher reward for it) of each scored sample, where `admit` lets the group pass."""
    rewards = [sample.reward for sample in _scored(group)]
    step = max(rewards) - min(rewards) or 1.0
    for place, sample in enumerate(group.samples):
        if sample.is_scored and sample.reward is not None:
            parts = {name: value + step for name, value in sample.rewards.items()}
            better = attrs.evolve(sample, reward=sample.reward + step, rewards=parts)
            raised = attrs.evolve(group, samples=(*group.samples[:place], better, *group.samples[place + 1 :]))
            if admitted(algorithm, raised) is None:
                yield place, raised


def _advantage(algorithm: Algorithm, group: Group, place: int) -> float:
    expect_advantages(algorithm, [group])
    value = advantages_of(algorithm, [group])[0][place]
    assert value is not None, "the sample is scored"
    return value


def _scored(group: Group) -> list[Any]:
    return [sample for sample in group.samples if sample.is_scored]


def _close(seen: Sequence[float | None], expected: Sequence[float | None]) -> bool:
    return len(seen) == len(expected) and all(
        first is not None and second is not None and math.isclose(first, second, rel_tol=1e-6, abs_tol=1e-9)
        for first, second in zip(seen, expected, strict=True)
    )


def _text(values: Sequence[float | None]) -> str:
    return ", ".join("None" if value is None else f"{value:g}" for value in values)


class AlgorithmAdmission(AlgorithmSubject):
    """Groups are refused for a reason, and something is left to train on."""

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


class AlgorithmEstimating(AlgorithmSubject):
    """Estimates are the same however the batch lies, and leave what they are made from as it is."""

    @pytest.fixture
    def taken(self, trainable: Algorithm, batch: Batch) -> Sequence[Taken]:
        """All sequences of a batch."""
        if not isinstance(trainable, Estimating):
            pytest.skip("it has no summarise and settle")
        return [batch.taken(index, trainable) for index in range(len(batch.lengths))]

    def test_an_estimate_depends_on_what_was_summarised_alone(
        self, make: Callable[..., Any], taken: Sequence[Taken]
    ) -> None:
        """Other sequences lie in other processes, of which nothing else is known."""
        first = estimates_of(make(), taken)
        said = {each.place: [*map(float, make().summarise(each))] for each in taken}
        places = range(len(taken))
        for when, order in (
            ("by an instance that summarised nothing", places),
            ("in another order", places[::-1]),
            ("of the last sequence alone", places[-1:]),
        ):
            again = settled(make(), said, [taken[place] for place in order])
            if not all(map(_same, [first[place] for place in order], again)):
                fault(
                    f"estimates made {when} differ; keep no state, and tell of other sequences what is needed by the "
                    "numbers of summarise"
                )

    def test_what_was_taken_is_left_as_it_is(self, make: Callable[..., Any], taken: Sequence[Taken]) -> None:
        """The trainer prices decisions from the same tensors."""
        before = [_copies(each) for each in taken]
        estimates_of(make(), taken)
        if not all(all(map(torch.equal, was, _copies(each))) for was, each in zip(before, taken, strict=True)):
            fault("summarise or settle changed log-probs or values in place; work on a copy (no method that ends in _)")


def _same(first: Estimate, second: Estimate) -> bool:
    alike = [_equal(*both) for both in zip(_given(first), _given(second), strict=True)]
    return all(alike) and first.metrics == second.metrics


def _given(estimate: Estimate) -> tuple[torch.Tensor | None, ...]:
    return estimate.advantages_n, estimate.targets_n


def _equal(first: torch.Tensor | None, second: torch.Tensor | None) -> bool:
    return torch.equal(first, second) if first is not None and second is not None else first is second


def _copies(taken: Taken) -> list[torch.Tensor]:
    held = (taken.logprobs_n, *taken.frozen_n.values(), taken.values_n)
    return [each_n.clone() for each_n in held if each_n is not None]
