"""Tests that a step does not depend on how its batch was split: over micro-batches, over ranks, in which order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, TypeAlias

import pytest

from cosmos_core.protocols import Algorithm, AlgorithmCapabilities
from cosmos_core.testing.conformance.algorithm.batch import Batch
from cosmos_core.testing.conformance.algorithm.stepping import Ranks, Step, train
from cosmos_core.testing.conformance.algorithm.subject import AlgorithmSubject
from cosmos_core.testing.conformance.plugin import fault

Split: TypeAlias = Callable[[int], Ranks]

_TOLERANCE: Final = 1e-6
"""Of float32 prices that are added up in float64, relative to the largest term."""

MICRO_BATCHES: Final[Mapping[str, Split]] = {
    "a micro-batch for each sequence": lambda number: [[[index] for index in range(number)]],
    "two micro-batches": lambda number: [[range(number // 2), range(number // 2, number)]],
    "one sequence in a micro-batch of its own": lambda number: [[range(number - 1), [number - 1]]],
}
RANKS: Final[Mapping[str, Split]] = {
    "two ranks": lambda number: [[range(0, number, 2)], [range(1, number, 2)]],
    "three ranks with several micro-batches": lambda number: [
        [[index] for index in range(rank, number, 3)] for rank in range(3)
    ],
    "a rank with nothing to do": lambda number: [[range(number)], []],
}
ORDERS: Final[Mapping[str, Split]] = {
    "the sequences reversed": lambda number: [[range(number - 1, -1, -1)]],
    "the second half first": lambda number: [[[*range(number // 2, number), *range(number // 2)]]],
}


class AlgorithmSplits(AlgorithmSubject):
    """Whether the loss and the gradient of a step are those of the whole batch, however it lies."""

    @pytest.mark.parametrize("split", MICRO_BATCHES)
    def test_a_step_does_not_depend_on_its_micro_batches(self, trainable: Algorithm, batch: Batch, split: str) -> None:
        """Their size is a matter of memory, never of the result."""
        _expect_the_same_step(trainable, batch, split, MICRO_BATCHES[split])

    @pytest.mark.parametrize("split", RANKS)
    def test_a_step_does_not_depend_on_its_ranks(self, trainable: Algorithm, batch: Batch, split: str) -> None:
        """Replicas come and go."""
        _expect_the_same_step(trainable, batch, split, RANKS[split])

    @pytest.mark.parametrize("order", ORDERS)
    def test_a_step_does_not_depend_on_the_order_of_sequences(
        self, trainable: Algorithm, batch: Batch, order: str
    ) -> None:
        """Packing puts them as they fit."""
        _expect_the_same_step(trainable, batch, order, ORDERS[order])

    def test_a_step_does_not_depend_on_where_its_sequences_are_cut(
        self, trainable: Algorithm, capabilities: AlgorithmCapabilities, batch: Batch
    ) -> None:
        """A world model may spread a sequence over micro-batches: each decision is a forward."""
        if "latents" not in capabilities.payload_kinds:
            pytest.skip("not declared: sequences of tokens are never cut")
        number = len(batch.lengths)
        parts = train(trainable, batch, [[range(number)]], longest=2)
        advice = (
            "price each decision by itself (`Estimating` is told of whole sequences), or declare payload_kinds = "
            "frozenset({'tokens'})"
        )
        _expect_same(train(trainable, batch, [[range(number)]]), parts, "sequences cut after two decisions", advice)


def _expect_the_same_step(algorithm: Algorithm, batch: Batch, name: str, split: Split) -> None:
    number = len(batch.lengths)
    whole, parts = train(algorithm, batch, [[range(number)]]), train(algorithm, batch, split(number))
    advice = "price each decision from its own sequence alone; averages over the batch are `aggregation`'s"
    _expect_same(whole, parts, name, advice)


def _expect_same(whole: Step, parts: Step, name: str, advice: str) -> None:
    if not abs(parts.loss - whole.loss) <= _TOLERANCE * whole.magnitude:
        fault(f"the loss of a batch is {whole.loss:.6g} in one piece, and {parts.loss:.6g} with {name}; {advice}")
    difference_N = (parts.gradient_N - whole.gradient_N).abs()
    place = int(difference_N.argmax())
    if not difference_N[place] <= _TOLERANCE * whole.gradient_N.abs().max():
        fault(
            f"the gradient of a decision is {whole.gradient_N[place].item():.6g} with the batch in one piece, and "
            f"{parts.gradient_N[place].item():.6g} with {name}; {advice}"
        )
