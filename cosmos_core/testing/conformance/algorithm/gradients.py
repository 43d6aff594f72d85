"""Tests of the gradient of an algorithm's loss: its sign, its scale, where it must vanish, and that it is finite.

Shape legend: N decisions of the batch.
"""

from __future__ import annotations

from typing import Final

import attrs
import pytest
import torch

from cosmos_core.protocols import Algorithm, AlgorithmCapabilities, Decided, Decisions
from cosmos_core.testing.conformance.algorithm.batch import Batch, draw, extreme
from cosmos_core.testing.conformance.algorithm.stepping import Part, first_nonfinite, gradient_of, outputs, price_all
from cosmos_core.testing.conformance.algorithm.subject import AlgorithmSubject
from cosmos_core.testing.conformance.plugin import fault

_STRENGTHS: Final = (0.0, 1.0, -1.0, 1e-6, 1e3, -1e3)


class AlgorithmGradients(AlgorithmSubject):
    """Whether minimising the loss does what an algorithm is for."""

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
    """What the algorithm saw, in double precision, with a gradient of its own."""
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
