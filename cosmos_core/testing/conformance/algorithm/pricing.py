"""Tests of what an algorithm's loss reads, leaves alone and reports.

Shape legend: N decisions of the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch

from cosmos_core.protocols import CORE_METRICS, Algorithm, AlgorithmCapabilities, Estimating, is_core_metric
from cosmos_core.testing.conformance.algorithm.batch import Batch, extreme
from cosmos_core.testing.conformance.algorithm.calls import consulted, described, properties_of
from cosmos_core.testing.conformance.algorithm.stepping import Part, estimated, first_nonfinite, gradient_of, price_all
from cosmos_core.testing.conformance.algorithm.subject import AlgorithmSubject
from cosmos_core.testing.conformance.plugin import fault


class AlgorithmPricing(AlgorithmSubject):
    """Whether the loss uses what it is given, and gives what the trainer can use."""

    def test_every_decision_gets_a_price(self, algorithm: Algorithm, batch: Batch) -> None:
        """Of a micro-batch, from nothing but what the algorithm asked for."""
        properties_of(algorithm)
        price_all(algorithm, batch)

    def test_the_old_log_probs_that_it_asks_for_are_used(self, trainable: Algorithm, batch: Batch) -> None:
        """Else stale samples go uncorrected, or a forward is paid for nothing."""
        if trainable.old_logprobs == "none":
            pytest.skip("not declared: old_logprobs is 'none'")
        if "old_logprobs" in self.ignores:
            pytest.skip("old_logprobs is in `ignores`")
        if _same(price_all(trainable, batch), price_all(trainable, _shifted(trainable, batch))):
            fault(
                f"old_logprobs = {trainable.old_logprobs!r}, but prices and gradients are the same whatever "
                "decisions.old_logprobs_N holds; compare log-probs with it, never with themselves detached, or "
                "declare old_logprobs = 'none'"
            )

    def test_the_entropy_that_it_asks_for_is_used(self, trainable: Algorithm, batch: Batch) -> None:
        """An entropy costs memory for the whole vocabulary."""
        if not trainable.needs_entropy:
            pytest.skip("not declared: needs_entropy is False")
        if "entropy" in self.ignores:
            pytest.skip("entropy is in `ignores`")
        other = attrs.evolve(batch, entropy_N=batch.entropy_N.flip(0) + 0.5)
        first, second = price_all(trainable, batch), price_all(trainable, other)
        if not torch.equal(gradient_of(first), gradient_of(second)):
            return
        if torch.equal(first.loss.loss_N, second.loss.loss_N):
            fault(
                "needs_entropy is True, but prices and gradients are the same whatever decisions.entropy_N holds; "
                "declare needs_entropy = False, or, if it is only to be reported, ignores = frozenset({'entropy'}) "
                "in the test class"
            )
        fault(
            "decisions.entropy_N changes prices and no gradient: it is detached, so a bonus of it moves nothing; make "
            "it a factor of a term that has a gradient, or take it out"
        )

    def test_the_frozen_models_that_it_consults_are_used(self, trainable: Algorithm, batch: Batch) -> None:
        """Each is a whole model in memory, and a forward of the batch."""
        roles = [role for role in consulted(trainable) if role not in self.ignores]
        if not roles:
            pytest.skip("it consults no frozen model, or all are in `ignores`")
        for role in roles:
            others = {**batch.frozen_N, role: batch.frozen_N[role] + 0.2}
            other = attrs.evolve(batch, frozen_N=others)
            if torch.equal(gradient_of(price_all(trainable, batch)), gradient_of(price_all(trainable, other))):
                fault(
                    f"consults names the {role}, but gradients are the same whatever it says; use "
                    f"decisions.frozen[{role!r}], or, if it is only to be reported, set ignores = "
                    f"frozenset({{{role!r}}}) in the test class"
                )

    def test_the_same_decisions_cost_the_same_each_time(
        self, make: Callable[..., Any], trainable: Algorithm, batch: Batch
    ) -> None:
        """A loss that remembers would differ between replicas, and after a restart."""
        first, used = price_all(trainable, batch), make()
        price_all(used, attrs.evolve(batch, logprobs_N=batch.logprobs_N - 1.0))
        for when, again in (
            ("again", price_all(trainable, batch)),
            ("after others", price_all(used, batch)),
            ("by another instance", price_all(make(), batch)),
        ):
            if not _same(first, again):
                fault(
                    f"the same decisions priced {when} cost something else; loss must depend on nothing but `decisions`"
                )

    def test_the_loss_leaves_its_inputs_as_they_are(self, trainable: Algorithm, batch: Batch) -> None:
        """The trainer measures and reports from the same tensors afterwards."""
        part = price_all(trainable, batch)
        advantages_N = batch.advantages_of_decisions()
        if isinstance(trainable, Estimating):
            advantages_N = torch.cat([each.advantages_n for each in estimated(trainable, batch)])
        inputs = {
            "logprobs_N": (part.decided.logprobs_N, batch.logprobs_N),
            "behaviour_logprobs_N": (part.known.behaviour_logprobs_N, batch.behaviour_logprobs_N),
            "advantages_N": (part.known.advantages_N, advantages_N),
            "entropy_N": (part.decided.entropy_N, batch.entropy_N),
        }
        if trainable.old_logprobs == "recompute":
            inputs["old_logprobs_N"] = (part.old_logprobs_N, batch.old_logprobs_N)
        for name, (seen_N, given_N) in inputs.items():
            if seen_N is not None and given_N is not None and not torch.equal(seen_N, given_N):
                fault(f"loss changed decisions.{name} in place; work on a copy (no method that ends in _)")

    def test_metrics_are_one_detached_number_for_each_decision(
        self, trainable: Algorithm, capabilities: AlgorithmCapabilities, batch: Batch
    ) -> None:
        """The trainer averages them over the decisions of the step, under names of their own."""
        for given in (batch, extreme(capabilities, advantages=(1.0, -1.0))):
            part = price_all(trainable, given)
            for name, values_N in part.loss.metrics.items():
                expect_metric(name, values_N, len(given.logprobs_N))
                place = first_nonfinite(values_N)
                if place is not None:
                    fault(f"the metric {name!r} of a decision is {values_N[place].item()} at {part.situation(place)}")


def expect_metric(name: str, value: object, number: int) -> None:
    """Fault a metric that the trainer cannot average, or whose name is the core's."""
    if is_core_metric(name):
        own = ", ".join(sorted(CORE_METRICS))
        fault(f"the metric {name!r} has a name of the core's own ({own}, and all that end in _s); rename it")
    if not isinstance(value, torch.Tensor) or value.shape != (number,) or value.dtype != torch.float32:
        fault(
            f"the metric {name!r} is {described(value)} for {number} decisions; give one float32 for each: the trainer "
            "takes the average"
        )
    if value.requires_grad:
        fault(f"the metric {name!r} carries a gradient, and so keeps the step's memory; detach it")


def _same(first: Part, second: Part) -> bool:
    """Whether prices and gradients are equal, bit for bit."""
    return torch.equal(first.loss.loss_N, second.loss.loss_N) and torch.equal(gradient_of(first), gradient_of(second))


def _shifted(algorithm: Algorithm, batch: Batch) -> Batch:
    """The batch with other old log-probs, of the sort that the algorithm asks for."""
    if algorithm.old_logprobs == "recompute" or batch.behaviour_logprobs_N is None:
        return attrs.evolve(batch, old_logprobs_N=batch.old_logprobs_N + 0.03)
    return attrs.evolve(batch, behaviour_logprobs_N=batch.behaviour_logprobs_N + 0.03)
