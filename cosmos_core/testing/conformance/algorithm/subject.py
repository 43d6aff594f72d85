"""What the tests of algorithms share: the instance under test, its context, and what its author can override."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import pytest
import torch

from cosmos_core.protocols import Algorithm, AlgorithmCapabilities, AlgorithmContext, Decisions, Kind
from cosmos_core.testing.conformance.algorithm.batch import Batch, draw
from cosmos_core.testing.conformance.algorithm.calls import admitted, expect_advantages, properties_of
from cosmos_core.testing.conformance.algorithm.groups import sampled_groups
from cosmos_core.testing.conformance.algorithm.stepping import price_all
from cosmos_core.testing.conformance.plugin import OneThread
from cosmos_core.types import Group


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
        """What a recipe that the algorithm can run in says."""
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
