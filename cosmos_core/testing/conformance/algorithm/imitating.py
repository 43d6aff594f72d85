"""Tests of what an algorithm makes of demonstrations that it imitates beside rollouts (`Imitating`).

Shape legend: N decisions of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import pytest
import torch

from cosmos_core.policy.training.microbatch import know
from cosmos_core.protocols import Algorithm, AlgorithmCapabilities, Decided, Imitating, Loss
from cosmos_core.testing.conformance.algorithm.batch import Batch, draw, extreme
from cosmos_core.testing.conformance.algorithm.calls import calling, priced_imitation
from cosmos_core.testing.conformance.algorithm.pricing import expect_metric
from cosmos_core.testing.conformance.algorithm.stepping import first_nonfinite, pieced
from cosmos_core.testing.conformance.algorithm.stepping import micro_batch_of as packed
from cosmos_core.testing.conformance.algorithm.subject import AlgorithmSubject
from cosmos_core.testing.conformance.plugin import fault

_CPU = torch.device("cpu")


class AlgorithmImitating(AlgorithmSubject):
    """Whether demonstrations become likelier, however they lie."""

    @pytest.fixture
    def imitating(self, algorithm: Algorithm, capabilities: AlgorithmCapabilities) -> Imitating:
        """The algorithm."""
        if not isinstance(algorithm, Imitating):
            pytest.skip("not declared: it imitates nothing beside rollouts (`Imitating`)")
        if capabilities.source != "rollouts":
            fault(f"it has `imitation`, and learns from {capabilities.source}: these are its batch; price them in loss")
        return algorithm

    @pytest.fixture
    def shown(self, imitating: Imitating, capabilities: AlgorithmCapabilities) -> Batch:
        """Demonstrations."""
        with calling("reading num_demonstrations"):
            number = imitating.num_demonstrations
        if number == 0:
            pytest.skip("with these options it imitates nothing")
        return as_demonstrations(draw(capabilities))

    def test_the_number_of_demonstrations_is_a_count(self, make: Callable[..., Any], imitating: Imitating) -> None:
        """Every replica reads as many."""
        with calling("reading num_demonstrations"):
            numbers: list[object] = [imitating.num_demonstrations, make().num_demonstrations]
        if not isinstance(numbers[0], int) or isinstance(numbers[0], bool) or numbers[0] < 0 or len({*numbers}) > 1:
            fault(
                f"num_demonstrations is {numbers[0]!r}, and {numbers[1]!r} in another instance; give an integer of at "
                "least 0, by the options alone"
            )

    def test_demonstrations_become_likelier(self, imitating: Imitating, shown: Batch) -> None:
        """From log-probs alone: nothing was generated, and no frozen model is asked."""
        loss, logprobs_N = price_demonstrations(imitating, shown)
        (gradient_N,) = torch.autograd.grad(loss.loss_N.sum(), logprobs_N)
        if bool((gradient_N > 0).any()) or not bool((gradient_N < 0).any()):
            fault(
                f"the gradients of the prices of demonstrations by their log-probs are {gradient_N.tolist()[:6]}…; a "
                "demonstration that becomes likelier must not cost more, and some must cost less"
            )
        for name, values_N in loss.metrics.items():
            expect_metric(name, values_N, len(shown.logprobs_N))

    def test_prices_of_demonstrations_are_finite(
        self, imitating: Imitating, shown: Batch, capabilities: AlgorithmCapabilities
    ) -> None:
        """However unlikely they are."""
        assert shown is not None
        loss, logprobs_N = price_demonstrations(imitating, as_demonstrations(extreme(capabilities, advantages=(1.0,))))
        (gradient_N,) = torch.autograd.grad(loss.loss_N.sum(), logprobs_N)
        for what, values_N in (("price", loss.loss_N.detach()), ("gradient", gradient_N)):
            if (place := first_nonfinite(values_N)) is not None:
                fault(
                    f"the {what} of a demonstration's decision is {values_N[place].item()} at a log-prob of "
                    f"{logprobs_N[place].item():g}"
                )

    def test_prices_of_demonstrations_do_not_depend_on_how_they_lie(self, imitating: Imitating, shown: Batch) -> None:
        """Each process has some of them, and packs them as they fit."""
        number = len(shown.lengths)
        whole, _ = price_demonstrations(imitating, shown)
        parts = [
            price_demonstrations(imitating, shown, members)[0].loss_N
            for members in (range(number // 2), range(number // 2, number))
        ]
        if not torch.allclose(torch.cat(parts), whole.loss_N, rtol=1e-5, atol=1e-6):
            fault(
                "prices of demonstrations change with what else is in the micro-batch; price each decision from its "
                "own sequence alone; averages are `aggregation`'s"
            )


def as_demonstrations(batch: Batch) -> Batch:
    """The batch as if nobody had generated it."""
    return attrs.evolve(batch, behaviour_logprobs_N=None, advantages=(1.0,) * len(batch.lengths))


def price_demonstrations(
    algorithm: Imitating, batch: Batch, members: Sequence[int] | None = None
) -> tuple[Loss, torch.Tensor]:
    """The prices of a micro-batch of demonstrations, and the log-probs that they depend on."""
    share = range(len(batch.lengths)) if members is None else members
    (parts,) = pieced(batch, [share], None)
    chosen = torch.tensor([place for each in parts for place in each.of(batch.decisions_of(each.sequence))])
    sequences = [batch.sequence(index) for index in share]
    known = know(algorithm, packed(share, parts), sequences, batch.counts(), _CPU)
    logprobs_N = batch.logprobs_N[chosen].clone().requires_grad_()
    entropy_N = batch.entropy_N[chosen] if algorithm.needs_entropy else None
    return priced_imitation(algorithm, Decided(logprobs_N=logprobs_N, entropy_N=entropy_N), known), logprobs_N
