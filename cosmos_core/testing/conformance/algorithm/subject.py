"""Fixtures of the tests of algorithms: the instance under test, its context, and what its author can override."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import pytest
import torch

from cosmos_core.protocols import Algorithm, AlgorithmCapabilities, AlgorithmContext, Decisions, Kind
from cosmos_core.testing.conformance.algorithm.calls import Batch, admitted, draw, expect_advantages, properties_of
from cosmos_core.testing.conformance.algorithm.world import price_all
from cosmos_core.testing.conformance.plugin import OneThread
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


class AlgorithmSubject(OneThread):
    """The algorithm under test. What can be overridden is told by `AlgorithmConformance`."""

    kind: ClassVar[Kind] = "algorithm"
    on_policy_scale: ClassVar[float | None] = 1.0
    couples_decisions: ClassVar[bool] = False
    ignores: ClassVar[frozenset[str]] = frozenset()
    rewards_order_advantages: ClassVar[bool] = True
    has_other_terms: ClassVar[bool] = False

    @pytest.fixture
    def context(self, capabilities: AlgorithmCapabilities) -> AlgorithmContext:
        """The context of a recipe that the algorithm can run in."""
        if capabilities.source != "rollouts":
            size = 2 if capabilities.source == "preferences" else 1
            return AlgorithmContext(group_size=size, temperature=1.0, max_units=16, max_staleness=0)
        size = max(4, capabilities.min_group_size)
        return AlgorithmContext(group_size=size, temperature=1.0, max_units=16, max_staleness=2)

    @pytest.fixture
    def algorithm(self, make: Callable[..., Any]) -> Algorithm:
        """An instance."""
        made: Algorithm = make()
        return made

    @pytest.fixture
    def batch(self, capabilities: AlgorithmCapabilities) -> Batch:
        """A step's batch, slightly off-policy."""
        return draw(capabilities)

    @pytest.fixture
    def trainable(self, algorithm: Algorithm, batch: Batch) -> Algorithm:
        """The algorithm, if it prices a batch at all; what one test says need not be said by all."""
        try:
            properties_of(algorithm)
            price_all(algorithm, batch)
        except pytest.fail.Exception:
            pytest.skip("no batch can be priced: see the tests of its properties and of every decision's price")
        return algorithm

    @pytest.fixture
    def groups(self, capabilities: AlgorithmCapabilities, context: AlgorithmContext) -> Sequence[Group]:
        """Finished groups: ordinary rewards, equal ones, far and near ones, some of them unscored."""
        if capabilities.source != "rollouts":
            pytest.skip(f"{capabilities.source} are in no groups")
        return sampled_groups(capabilities, context)

    @pytest.fixture
    def kept(self, algorithm: Algorithm, groups: Sequence[Group]) -> Sequence[Group]:
        """The groups that `admit` lets pass: a run asks for advantages of no others."""
        try:
            kept = tuple(group for group in groups if admitted(algorithm, group) is None)
        except pytest.fail.Exception:
            pytest.skip("admit fails: see test_a_group_is_admitted_or_refused_with_a_reason")
        if not kept:
            pytest.skip("admit refuses every group: see test_something_is_left_to_train_on")
        return kept

    @pytest.fixture
    def estimator(self, algorithm: Algorithm, kept: Sequence[Group]) -> Algorithm:
        """The algorithm, if it gives advantages at all; what one test says need not be said by all."""
        try:
            expect_advantages(algorithm, copy.deepcopy(kept))
        except pytest.fail.Exception:
            pytest.skip("no advantages: see test_scored_samples_have_a_finite_advantage_and_others_none")
        return algorithm

    def reference(self, decisions: Decisions) -> torch.Tensor | None:  # noqa: ARG002 - for those who override it
        """The price of each decision by the formula of the paper, in float64; None if there is none to compare with."""
        return None
