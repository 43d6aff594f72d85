"""What the tests of algorithms share: the instance under test, its context, and what its author can override."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch

from cosmos_core.protocols import Algorithm, AlgorithmCapabilities, AlgorithmContext, Decisions, Kind
from cosmos_core.testing.conformance.algorithm.batch import Batch, draw, price_all
from cosmos_core.testing.conformance.algorithm.calls import properties_of
from cosmos_core.testing.conformance.plugin import PluginConformance


class AlgorithmSubject(PluginConformance):
    """The algorithm under test. What can be overridden is told by `AlgorithmConformance`."""

    kind: ClassVar[Kind] = "algorithm"
    on_policy_scale: ClassVar[float | None] = 1.0
    couples_decisions: ClassVar[bool] = False
    ignores: ClassVar[frozenset[str]] = frozenset()

    @pytest.fixture
    def context(self, capabilities: AlgorithmCapabilities) -> AlgorithmContext:
        """What a recipe that the algorithm can run in says."""
        if capabilities.source == "demonstrations":
            return AlgorithmContext(group_size=1, temperature=1.0, max_units=16, max_staleness=0)
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

    def reference(self, decisions: Decisions) -> torch.Tensor | None:  # noqa: ARG002 - for those who override it
        """The price of each decision by the formula of the paper, in float64; None if there is none to compare with."""
        return None

    @pytest.fixture(autouse=True)
    def _one_thread(self) -> Iterator[None]:
        """The tensors are too small for more."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        yield
        torch.set_num_threads(threads)
