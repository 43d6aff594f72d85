"""Groups that an algorithm is asked about, and checks of what it makes of them: admissions and advantages."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import attrs

from cosmos_core.protocols import Algorithm, AlgorithmCapabilities, AlgorithmContext
from cosmos_core.testing.conformance.algorithm.calls import admitted, advantages_of, expect_advantages, rewards_text
from cosmos_core.testing.conformance.plugin import fault
from cosmos_core.types import Group, Sample, SampleStatus

_UNSCORED = (SampleStatus.REWARD_FAILED, SampleStatus.REWARD_TIMEOUT)
_ROUNDING = 1e-5
"""Of an advantage, relative to the larger one, or to 1."""


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
    return tuple(sampled_group(position, each, longest=context.max_units) for position, each in enumerate(rewards))


def sampled_group(position: int, rewards: Sequence[float | None], *, longest: int) -> Group:
    """A group with these rewards; None where a reward failed."""
    samples = tuple(_sample(index, reward, longest) for index, reward in enumerate(rewards))
    return Group(position=position, samples=samples)


def _sample(index: int, reward: float | None, longest: int) -> Sample:
    status = _UNSCORED[index % 2] if reward is None else SampleStatus.OK if index % 3 else SampleStatus.TRUNCATED
    return Sample(
        index=index,
        status=status,
        reward=reward,
        rewards={} if reward is None else {"reward": reward},
        oldest_version=index % 2,
        newest_version=1,
        num_units=longest if status is SampleStatus.TRUNCATED else 1 + index % longest,
        num_prompt_units=3,
        detail="the reward failed" if reward is None else "",
    )


def expect_same_admission(algorithm: Algorithm, other: Algorithm, groups: Sequence[Group]) -> None:
    """Fault answers that depend on more than the group; `other` is an instance that was asked nothing."""
    forward = [admitted(algorithm, group) for group in groups]
    backward, elsewhere = ([admitted(each, group) for group in groups[::-1]][::-1] for each in (algorithm, other))
    for group, *answers in zip(groups, forward, backward, elsewhere, strict=True):
        if len(set(answers)) > 1:
            fault(
                f"admit said {' and '.join(sorted(map(repr, set(answers))))} of one group with "
                f"{rewards_text([group])}; judge a group by itself, keep no state and draw no random numbers"
            )


def expect_unscored_take_no_part(algorithm: Algorithm, kept: Sequence[Group], fewest: int) -> None:
    """Fault advantages that change once unscored samples are left out of their group."""
    for place, group in enumerate(kept):
        without = attrs.evolve(group, samples=tuple(_scored(group)))
        if not fewest <= len(without.samples) < len(group.samples) or admitted(algorithm, without) is not None:
            continue
        seen = [value for value in advantages_of(algorithm, kept)[place] if value is not None]
        expected = advantages_of(algorithm, [*kept[:place], without, *kept[place + 1 :]])[place]
        if not _close(seen, expected):
            fault(
                f"the scored samples of a group with {rewards_text([group])} have advantages {_text(seen)}, and "
                f"{_text(expected)} without its unscored samples; leave samples whose is_scored is False out of every "
                "mean and deviation, never count them as 0"
            )


def expect_unscored_are_no_zeros(algorithm: Algorithm, context: AlgorithmContext) -> None:
    """Fault advantages that an unscored sample changes as a reward of 0 does."""
    size = context.group_size
    matters, as_zero = False, True
    for sign in (1.0, -1.0):
        others = [sign * (1.0 + index / size) for index in range(1, size)]
        firsts = (None, 0.0, 3.0 * sign)
        compared = [sampled_group(0, [first, *others], longest=context.max_units) for first in firsts]
        if any(admitted(algorithm, group) is not None for group in compared):
            continue
        unscored, zero, far = (advantages_of(algorithm, [group])[0][1:] for group in compared)
        matters |= not _close(zero, far)
        as_zero &= _close(unscored, zero)
    if matters and as_zero:
        fault(
            "an unscored sample changes the advantages of its group as a reward of 0 does; take means over the "
            "samples whose is_scored is True, and divide by their number, not by the group's size"
        )


def expect_status_counts(algorithm: Algorithm, kept: Sequence[Group]) -> None:
    """Fault advantages and admissions by the reward that a failed sample has all the same."""
    numbered = [
        attrs.evolve(
            group,
            samples=tuple(each if each.is_scored else attrs.evolve(each, reward=5.0) for each in group.samples),
        )
        for group in kept
    ]
    advice = (
        "the reward of a sample whose status is reward_failed or reward_timeout; look at sample.is_scored, not at "
        "whether sample.reward is None"
    )
    if any(admitted(algorithm, group) is not None for group in numbered):
        fault(f"admit refuses a group for {advice}")
    if advantages_of(algorithm, numbered) != advantages_of(algorithm, kept):
        fault(f"advantages change with {advice}")


def expect_order_of_rewards(algorithm: Algorithm, kept: Sequence[Group]) -> None:
    """Fault advantages that fall with their sample's own reward, or never rise with it."""
    shows = False
    for group in kept:
        for place, raised in _raised(algorithm, group):
            before, after = (_advantage(algorithm, each, place) for each in (group, raised))
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


def _raised(algorithm: Algorithm, group: Group) -> Iterator[tuple[int, Group]]:
    """(sample, the group with a higher reward for it) of each scored sample, where `admit` lets the group pass."""
    rewards = [sample.reward for sample in _scored(group) if sample.reward is not None]
    step = max(rewards) - min(rewards) or 1.0
    for place, sample in enumerate(group.samples):
        if sample.is_scored and sample.reward is not None:
            parts = {name: value + step for name, value in sample.rewards.items()}
            better = attrs.evolve(sample, reward=sample.reward + step, rewards=parts)
            raised = attrs.evolve(group, samples=(*group.samples[:place], better, *group.samples[place + 1 :]))
            if admitted(algorithm, raised) is None:
                yield place, raised


def _advantage(algorithm: Algorithm, group: Group, place: int) -> float:
    value = expect_advantages(algorithm, [group])[0][place]
    assert value is not None, "the sample is scored"
    return value


def _scored(group: Group) -> list[Sample]:
    return [sample for sample in group.samples if sample.is_scored]


def _close(seen: Sequence[float | None], expected: Sequence[float | None]) -> bool:
    return len(seen) == len(expected) and all(
        first is not None and second is not None and math.isclose(first, second, rel_tol=1e-6, abs_tol=1e-9)
        for first, second in zip(seen, expected, strict=True)
    )


def _text(values: Sequence[float | None]) -> str:
    return ", ".join("None" if value is None else f"{value:g}" for value in values)
