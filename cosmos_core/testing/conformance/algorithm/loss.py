"""Tests of what an algorithm's loss reads, leaves alone and reports.

Shape legend: N decisions of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

import attrs
import pytest
import torch

from cosmos_core.protocols import Algorithm, AlgorithmCapabilities, Decided, Decisions
from cosmos_core.protocols.algorithm import CORE_METRICS, Estimating, is_core_metric
from cosmos_core.testing.conformance.algorithm.calls import Batch, consulted, described, draw, extreme, properties_of
from cosmos_core.testing.conformance.algorithm.subject import AlgorithmSubject
from cosmos_core.testing.conformance.algorithm.world import (
    Part,
    Ranks,
    Step,
    estimated,
    first_nonfinite,
    gradient_of,
    outputs,
    price_all,
    train,
)
from cosmos_core.testing.conformance.plugin import fault


class AlgorithmPricing(AlgorithmSubject):
    """The loss uses what it is given, and gives what the trainer can use."""

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
    """True if prices and gradients are equal, bit for bit."""
    return torch.equal(first.loss.loss_N, second.loss.loss_N) and torch.equal(gradient_of(first), gradient_of(second))


def _shifted(algorithm: Algorithm, batch: Batch) -> Batch:
    """The batch with other old log-probs, of the sort that the algorithm asks for."""
    if algorithm.old_logprobs == "recompute" or batch.behaviour_logprobs_N is None:
        return attrs.evolve(batch, old_logprobs_N=batch.old_logprobs_N + 0.03)
    return attrs.evolve(batch, behaviour_logprobs_N=batch.behaviour_logprobs_N + 0.03)


_STRENGTHS: Final = (0.0, 1.0, -1.0, 1e-6, 1e3, -1e3)


class AlgorithmGradients(AlgorithmSubject):
    """Minimising the loss does what an algorithm is for."""

    def test_minimising_the_loss_makes_good_decisions_likelier(
        self, trainable: Algorithm, capabilities: AlgorithmCapabilities
    ) -> None:
        """On-policy, the gradient of a decision's price is minus its advantage, times `on_policy_scale`."""
        _expect_rewards(capabilities)
        batch = draw(capabilities, drift=0.0)
        advantages_N = price_all(trainable, batch).known.advantages_N
        gradient_N = _policy_gradient(trainable, batch, capabilities)
        for advantage, gradient in zip(advantages_N.tolist(), gradient_N.tolist(), strict=True):
            if gradient * advantage >= 0.0:
                fault(
                    f"on-policy, a decision with advantage {advantage:g} has a policy gradient of {gradient:g}, where "
                    f"{-advantage:g} is expected; {_direction(gradient)}"
                )
        if self.on_policy_scale is not None:
            _expect_scale(-gradient_N / advantages_N, self.on_policy_scale)

    def test_zero_advantage_gives_zero_policy_gradient(
        self, trainable: Algorithm, capabilities: AlgorithmCapabilities
    ) -> None:
        """A sequence that is neither better nor worse than expected must not move the policy."""
        if capabilities.source != "rollouts":
            pytest.skip(f"{capabilities.source} have no advantage")
        _expect_rewards(capabilities)
        if trainable.skips_zero_advantage:
            _expect_exactly_no_gradient(trainable, extreme(capabilities, advantages=(0.0,)))
            return
        batch = draw(capabilities, drift=0.0)
        if not self.has_other_terms:
            _expect_no_gradient_on_policy(trainable, _with_advantages(batch, 0.0))
            return
        if self.on_policy_scale is None:
            pytest.skip("has_other_terms is declared, and no on_policy_scale")
        none_N, plus_N, minus_N = (
            gradient_of(price_all(trainable, _with_advantages(batch, sign))) for sign in (0.0, 1.0, -1.0)
        )
        if not torch.allclose(none_N, (plus_N + minus_N) / 2.0, rtol=1e-4, atol=1e-6):
            fault(
                "with advantage 0, the gradient is not the part of the loss that does not depend on advantages; a "
                "policy term must vanish with its advantage"
            )

    def test_gradients_are_finite_however_far_off_policy(
        self, trainable: Algorithm, capabilities: AlgorithmCapabilities
    ) -> None:
        """One price or gradient that is not finite and the whole step is lost."""
        strengths = {"rollouts": _STRENGTHS, "demonstrations": (1.0,), "preferences": (1.0, -1.0)}[capabilities.source]
        part = price_all(trainable, extreme(capabilities, advantages=strengths))
        for name, values_N in (("price", part.loss.loss_N), ("gradient", gradient_of(part))):
            place = first_nonfinite(values_N)
            if place is not None:
                fault(
                    f"the {name} of a decision is {values_N[place].item()} at {part.situation(place)}; bound log "
                    "ratios (clamp(-20, 20)) before their exponential, and never multiply infinity by 0"
                )

    def test_the_price_of_a_decision_depends_on_its_own_log_prob_only(self, trainable: Algorithm, batch: Batch) -> None:
        """Averages are the trainer's; with `couples_decisions`, a price may depend on all of its own sequence."""
        part = price_all(trainable, batch)
        sequences = part.known.sequence_N.tolist()
        for place, one_N in enumerate(torch.eye(len(sequences))):
            gradient_N = gradient_of(part, one_N)
            own = list(batch.decisions_of(sequences[place])) if self.couples_decisions else [place]
            gradient_N[own] = 0.0
            if gradient_N.any():
                other = int(gradient_N.abs().argmax())
                advice = (
                    "sequences are priced one by one"
                    if self.couples_decisions
                    else "price each alone, or set couples_decisions = True in the test class if its sequence is "
                    "priced as one"
                )
                fault(
                    f"the price of decision {place} (sequence {sequences[place]}) has a gradient with respect to the "
                    f"log-prob of decision {other} (sequence {sequences[other]}); {advice}"
                )

    @pytest.mark.parametrize("drift", [0.0, 0.05, 0.5])
    def test_the_loss_equals_its_reference(
        self, trainable: Algorithm, capabilities: AlgorithmCapabilities, drift: float
    ) -> None:
        """Price and gradient are those of the formula that the author wrote down in float64."""
        part = price_all(trainable, draw(capabilities, drift=drift))
        decisions = _in_float64(trainable, part)
        expected_N = self.reference(decisions)
        if expected_N is None:
            pytest.skip("no reference: override reference(decisions) to compare with a formula")
        (expected_gradient_N,) = torch.autograd.grad(expected_N.sum(), decisions.logprobs_N, materialize_grads=True)
        pairs = (
            ("price", part.loss.loss_N.detach(), expected_N.detach()),
            ("gradient", gradient_of(part), expected_gradient_N),
        )
        for name, seen_N, right_N in pairs:
            error_N = (seen_N - right_N).abs() - 1e-4 * right_N.abs()
            place = int(error_N.argmax())
            if error_N[place] > 1e-5:
                fault(
                    f"the {name} of a decision is {seen_N[place].item():.6g} and its reference "
                    f"{right_N[place].item():.6g} at {part.situation(place)}"
                )


def _expect_rewards(capabilities: AlgorithmCapabilities) -> None:
    if not capabilities.needs_rewards:
        pytest.skip("needs_rewards is False: it learns from something else than advantages")


def _expect_scale(factors_N: torch.Tensor, scale: float) -> None:
    """Fault factors between minus the advantage and the policy gradient that are not all `scale`."""
    low, high, middle = factors_N.min().item(), factors_N.max().item(), factors_N.median().item()
    if torch.allclose(factors_N, torch.full_like(factors_N, scale), rtol=1e-4, atol=1e-5):
        return
    if high - low > 1e-3 * abs(high):
        fault(
            f"on-policy, the policy gradient is {low:g} times minus the advantage for one decision and {high:g} times "
            f"for another, expected {scale:g} times for each; divide by no length and by no count (`aggregation` "
            "weighs decisions), or set on_policy_scale = None in the test class if decisions are meant to weigh "
            "differently"
        )
    fault(
        f"on-policy, the policy gradient of a decision is {middle:g} times minus its advantage, expected {scale:g} "
        f"times; find the factor, or set on_policy_scale = {middle:.4g} in the test class if it is meant"
    )


def _expect_no_gradient_on_policy(algorithm: Algorithm, batch: Batch) -> None:
    part = price_all(algorithm, batch)
    gradient_N = gradient_of(part)
    place = int(gradient_N.abs().argmax())
    if not abs(gradient_N[place].item()) <= 1e-6:
        fault(
            f"on-policy, a decision with advantage 0 has a gradient of {gradient_N[place].item():g} at "
            f"{part.situation(place)}; multiply the policy term by the advantage alone, or, if the loss has a term "
            "that does not depend on advantages, set has_other_terms = True in the test class"
        )


def _expect_exactly_no_gradient(algorithm: Algorithm, batch: Batch) -> None:
    part = price_all(algorithm, batch)
    gradient_N = gradient_of(part)
    # One that is not finite is told by the test of finite gradients.
    wrong = torch.nonzero(gradient_N.isfinite() & (gradient_N != 0.0))
    if len(wrong):
        place = int(wrong[0])
        fault(
            f"skips_zero_advantage is declared, but a decision with advantage 0 has a gradient of "
            f"{gradient_N[place].item():g} at {part.situation(place)}; declare skips_zero_advantage = False, or "
            "take out the term that does not vanish with the advantage"
        )


def _policy_gradient(algorithm: Algorithm, batch: Batch, capabilities: AlgorithmCapabilities) -> torch.Tensor:
    """The part of the gradient that changes sign with the advantage; the whole of it where nothing was rolled out."""
    gradient_N = gradient_of(price_all(algorithm, batch))
    if capabilities.source != "rollouts":
        return gradient_N
    return (gradient_N - gradient_of(price_all(algorithm, _with_advantages(batch, -1.0)))) / 2.0


def _with_advantages(batch: Batch, factor: float) -> Batch:
    return attrs.evolve(batch, strength=factor)


def _direction(gradient: float) -> str:
    if gradient == 0.0:
        return "nothing would be learnt: decisions.logprobs_N was detached, or a bound cuts the gradient off on-policy"
    return "the sign is wrong, so good decisions would become less likely: a loss is minimised, return minus the gain"


def _in_float64(algorithm: Algorithm, part: Part) -> Decisions:
    """The decisions that the algorithm saw, in double precision, with a gradient of its own."""
    entropy_N, old_logprobs_N, known = part.decided.entropy_N, part.old_logprobs_N, part.known
    logprobs_N = part.decided.logprobs_N.detach().double().requires_grad_()
    frozen_N = {role: said.logprobs_N.double() for role, said in part.frozen.items()}
    return Decisions(
        logprobs_N=logprobs_N,
        behaviour_logprobs_N=known.behaviour_logprobs_N.double(),
        old_logprobs_N=None if old_logprobs_N is None else old_logprobs_N.double(),
        entropy_N=None if entropy_N is None else entropy_N.double(),
        advantages_N=known.advantages_N.double(),
        sequence_N=known.sequence_N,
        num_sequences=known.num_sequences,
        values_N=None if part.decided.values_N is None else part.decided.values_N.detach().double(),
        frozen=outputs(algorithm, Decided(logprobs_N=logprobs_N, entropy_N=None), frozen_N),
        targets_N=None if known.targets_N is None else known.targets_N.double(),
    )


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
    """The loss and the gradient of a step are those of the whole batch, however it lies."""

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
