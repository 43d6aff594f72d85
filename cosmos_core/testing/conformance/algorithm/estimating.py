"""Tests of advantages that an algorithm works out from log-probs, frozen models or the whole batch (`Estimating`).

Shape legend: n decisions of one sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from cosmos_core.protocols import Algorithm, Estimate, Estimating, Taken
from cosmos_core.testing.conformance.algorithm.batch import Batch
from cosmos_core.testing.conformance.algorithm.calls import estimates_of, settled
from cosmos_core.testing.conformance.algorithm.subject import AlgorithmSubject
from cosmos_core.testing.conformance.plugin import fault


class AlgorithmEstimating(AlgorithmSubject):
    """Whether estimates are the same however the batch lies, and leave what they are made from as it is."""

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
