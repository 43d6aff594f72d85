"""Groups of samples as a run gives them to an algorithm: ordinary ones, and every sort of awkward one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from cosmos_core.protocols import AlgorithmCapabilities, AlgorithmContext
from cosmos_core.types import Group, Sample, SampleStatus

_UNSCORED = (SampleStatus.REWARD_FAILED, SampleStatus.REWARD_TIMEOUT)


def sampled_groups(capabilities: AlgorithmCapabilities, context: AlgorithmContext) -> tuple[Group, ...]:
    """Groups that `advantages` may be given: each has at least `min_group_size` scored samples, and one."""
    size, fewest = context.group_size, max(1, capabilities.min_group_size)
    return tuple(
        sampled_group(position, rewards, longest=context.max_units)
        for position, rewards in enumerate(_rewards(size, fewest))
    )


def sampled_group(position: int, rewards: Sequence[float | None], *, longest: int) -> Group:
    """A group with these rewards; None where a reward failed."""
    return Group(
        position=position,
        samples=tuple(_sample(index, reward, longest) for index, reward in enumerate(rewards)),
    )


def _rewards(size: int, fewest: int) -> Iterator[list[float | None]]:
    yield [index / size for index in range(size)]
    yield [1.0, *[0.0] * (size - 1)]
    yield [0.0] * size
    yield [0.1] * size
    yield [1e6, *[-1e6] * (size - 1)]
    yield [1.0 + 1e-9 * index for index in range(size)]
    if size > fewest:
        yield [index / size if index != 1 else None for index in range(size)]
        yield [*[None] * (size - fewest), *[1.0 + index for index in range(fewest)]]


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
