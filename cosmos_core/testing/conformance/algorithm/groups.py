"""The tests of what an algorithm makes of groups: admissions and advantages."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from typing import ClassVar, Final, cast

import attrs
import pytest

from cosmos_core.protocols import Algorithm, AlgorithmCapabilities, AlgorithmContext
from cosmos_core.testing.conformance.algorithm.calls import admitted, advantages_of, rewards_text
from cosmos_core.testing.conformance.plugin import Make, fault, told_by
from cosmos_core.types import Group, Sample, SampleStatus

_UNSCORED: Final = (SampleStatus.REWARD_FAILED, SampleStatus.REWARD_TIMEOUT)
_ROUNDING: Final = 1e-5
"""Of an advantage, relative to the larger one, or to 1."""
_near = functools.partial(pytest.approx, rel=1e-6, abs=1e-9)


def sampled_groups(capabilities: AlgorithmCapabilities, context: AlgorithmContext) -> tuple[Group, ...]:
    """Groups that `advantages` may be given: each has at least `min_group_size` scored samples, and one."""
    size, fewest = context.group_size, max(1, capabilities.min_group_size)
    rewards: list[list[float | None]] = [
        [index / size for index in range(size)],
        [1.0, *[0.0] * (size - 1)],
        [0.0] * size,
        [0.1] * size,
        [1e6, *[-1e6] * (size - 1)],
        [1.0 + 1e-9 * index for index in range(size)],
    ]
    if size > fewest:
        rewards.append([index / size if index != 1 else None for index in range(size)])
        rewards.append([*[None] * (size - fewest), *[1.0 + index for index in range(fewest)]])
    return tuple(sampled_group(each, context, position) for position, each in enumerate(rewards))


def sampled_group(rewards: Sequence[float | None], context: AlgorithmContext, position: int = 0) -> Group:
    """A group with these rewards; None where a reward failed."""
    samples = []
    for index, reward in enumerate(rewards):
        is_cut = reward is not None and index % 3 == 0
        ended = SampleStatus.TRUNCATED if is_cut else SampleStatus.OK
        sample = Sample(
            index=index,
            status=_UNSCORED[index % 2] if reward is None else ended,
            reward=reward,
            rewards={} if reward is None else {"reward": reward},
            oldest_version=index % 2,
            newest_version=1,
            num_units=context.max_units if is_cut else 1 + index % context.max_units,
            num_prompt_units=3,
        )
        samples.append(sample)
    return Group(position=position, samples=tuple(samples))


class GroupTests:
    """Tests of admissions and advantages; the kit tells of the attributes."""

    rewards_order_advantages: ClassVar[bool] = True

    @pytest.fixture
    def groups(self, capabilities: AlgorithmCapabilities, context: AlgorithmContext) -> Sequence[Group]:
        """Finished groups: ordinary rewards, equal ones, far and near ones, some of them unscored."""
        if capabilities.source != "rollouts":
            pytest.skip(f"{capabilities.source} are in no groups")
        return sampled_groups(capabilities, context)

    @pytest.fixture
    def kept(self, algorithm: Algorithm, groups: Sequence[Group]) -> Sequence[Group]:
        """The groups that `admit` lets pass: a run asks for advantages of no others."""
        with told_by("test_groups_are_admitted_or_refused_with_a_reason"):
            kept = tuple(group for group in groups if admitted(algorithm, group) is None)
            return kept or fault("admit refuses every group")

    @pytest.fixture
    def estimator(self, algorithm: Algorithm, kept: Sequence[Group]) -> Algorithm:
        """The algorithm, if it gives advantages at all."""
        with told_by("test_scored_samples_have_a_finite_advantage_and_others_none"):
            advantages_of(algorithm, copy.deepcopy(kept))
            return algorithm

    def test_groups_are_admitted_or_refused_with_a_reason(
        self, make: Make, algorithm: Algorithm, groups: Sequence[Group], context: AlgorithmContext
    ) -> None:
        """Each by itself, in any order and on any replica; something is left to train on."""
        unscored = sampled_group([None] * context.group_size, context, len(groups))
        for group in (*groups, unscored):
            answer: object = admitted(algorithm, group)
            if answer is not None and not (isinstance(answer, str) and answer):
                fault(
                    f"admit returned {answer!r} for a group with {rewards_text(group)}; return None to train on it, "
                    "or a short reason to drop it, such as 'equal rewards'"
                )
        forward = [admitted(algorithm, group) for group in groups]
        backward, elsewhere = ([admitted(each, group) for group in groups[::-1]][::-1] for each in (algorithm, make()))
        for group, *answers in zip(groups, forward, backward, elsewhere, strict=True):
            if len(set(answers)) > 1:
                fault(
                    f"admit said {' and '.join(sorted(map(repr, set(answers))))} of one group with "
                    f"{rewards_text(group)}; judge a group by itself, keep no state and draw no random numbers"
                )
        kept = [group for group, answer in zip(groups, forward, strict=True) if answer is None]
        if not kept:
            fault(
                f"admit refuses every group, for example one with {rewards_text(groups[0])}: {forward[0]!r}; return "
                "None for the groups to train on, or override the fixture `groups` with such as it admits"
            )
        if self.rewards_order_advantages and not any(any(values) for values in advantages_of(algorithm, kept)):
            fault(
                f"every advantage is 0, though rewards differ ({rewards_text(*kept)}): nothing would be learnt; "
                "compute advantages from sample.reward"
            )

    def test_scored_samples_have_a_finite_advantage_and_others_none(
        self, make: Make, algorithm: Algorithm, kept: Sequence[Group]
    ) -> None:
        """Every replica works them out for itself, and reports the same records afterwards."""
        before = copy.deepcopy(kept)
        first = advantages_of(algorithm, kept)
        advantages_of(algorithm, kept[::-1])
        if advantages_of(algorithm, kept) != first:
            fault("advantages of the same groups differ at a second call; they must depend on nothing but `groups`")
        if advantages_of(make(), kept) != first:
            fault("two instances give different advantages to the same groups; draw no random numbers, keep no state")
        for group in kept:
            admitted(algorithm, group)
        if kept != before:
            fault("advantages or admit changed the groups that they were given; work on a copy")

    def test_unscored_samples_take_no_part_in_their_group(
        self,
        estimator: Algorithm,
        kept: Sequence[Group],
        capabilities: AlgorithmCapabilities,
        context: AlgorithmContext,
    ) -> None:
        """A reward that failed says nothing of the other samples, and is neither a bad answer nor a good one."""
        fewest = max(1, capabilities.min_group_size)
        expected = advantages_of(estimator, kept)
        for place, group in enumerate(kept):
            scored = [each for each in group.samples if each.is_scored]
            numbered = [each if each.is_scored else attrs.evolve(each, reward=5.0) for each in group.samples]
            for what, samples in (("without the others", scored), ("once the others have rewards", numbered)):
                other = attrs.evolve(group, samples=tuple(samples))
                refusal = admitted(estimator, other)
                if refusal is not None and samples is numbered:
                    fault(
                        f"admit refuses a group for the reward of a sample whose status is reward_failed or "
                        f"reward_timeout: {refusal!r}; look at sample.is_scored, not at whether sample.reward is None"
                    )
                if not fewest <= len(scored) < len(group.samples) or refusal is not None:
                    continue
                found = advantages_of(estimator, [*kept[:place], other, *kept[place + 1 :]])[place]
                before, after = ([each for each in values if each is not None] for values in (expected[place], found))
                if after != _near(before):
                    fault(
                        f"the scored samples of a group with {rewards_text(group)} have advantages {before}, and "
                        f"{after} {what}; leave samples whose is_scored is False out of all statistics, never "
                        "count them as 0"
                    )
        if context.group_size > fewest:
            _expect_unscored_are_no_zeros(estimator, context)

    def test_a_higher_reward_never_lowers_the_advantage_of_its_sample(
        self, estimator: Algorithm, kept: Sequence[Group], capabilities: AlgorithmCapabilities
    ) -> None:
        """Advantages are all that a policy learns of its rewards; in some group a higher reward must show."""
        if not capabilities.needs_rewards or not self.rewards_order_advantages:
            pytest.skip("needs_rewards or rewards_order_advantages is False")
        shows = False
        for group in kept:
            known = [each.reward for each in group.samples if each.is_scored and each.reward is not None]
            step = max(known) - min(known) or 1.0
            for place, sample in enumerate(group.samples):
                if not sample.is_scored or sample.reward is None:
                    continue
                parts = {name: value + step for name, value in sample.rewards.items()}
                better = attrs.evolve(sample, reward=sample.reward + step, rewards=parts)
                raised = attrs.evolve(group, samples=(*group.samples[:place], better, *group.samples[place + 1 :]))
                if admitted(estimator, raised) is not None:
                    continue
                before, after = (cast("float", advantages_of(estimator, [each])[0][place]) for each in (group, raised))
                difference = (after - before) / max(1.0, abs(before), abs(after))
                shows |= difference > _ROUNDING
                if difference < -_ROUNDING:
                    fault(
                        f"a sample of a group with {rewards_text(group)} has an advantage of {before:g}, and of "
                        f"{after:g} once its own reward is {better.reward:g}; is the sign wrong? Set "
                        "rewards_order_advantages = False in the test class if it is meant"
                    )
        if not shows:
            fault(
                "no sample's advantage rises with its own reward, in any group; compute advantages from "
                "sample.reward, or set rewards_order_advantages = False in the test class if they come from elsewhere"
            )


def _expect_unscored_are_no_zeros(algorithm: Algorithm, context: AlgorithmContext) -> None:
    """Fault advantages that an unscored sample changes as a reward of 0 does."""
    size = context.group_size
    matters, as_zero = False, True
    for sign in (1.0, -1.0):
        others = [sign * (1.0 + index / size) for index in range(1, size)]
        compared = [sampled_group([first, *others], context) for first in (None, 0.0, 3.0 * sign)]
        if any(admitted(algorithm, group) is not None for group in compared):
            continue
        unscored, zero, far = (advantages_of(algorithm, [group])[0][1:] for group in compared)
        matters |= zero != _near(far)
        as_zero &= unscored == _near(zero)
    if matters and as_zero:
        fault(
            "an unscored sample changes the advantages of its group as a reward of 0 does; take means over the "
            "samples whose is_scored is True, and divide by their number, not by the group's size"
        )
