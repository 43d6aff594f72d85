"""Checks of the prices that an algorithm gives to decisions, and of their gradients.

Shape legend: N decisions of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import attrs
import torch

from cosmos_core.protocols import Algorithm, Decided, Decisions
from cosmos_core.protocols.algorithm import CORE_METRICS, AdvantageEstimator, is_core_metric
from cosmos_core.testing.conformance.algorithm.calls import Batch, described
from cosmos_core.testing.conformance.algorithm.step import (
    Part,
    Ranks,
    estimated,
    first_nonfinite,
    gradient_of,
    outputs,
    price_all,
    train,
)
from cosmos_core.testing.conformance.plugin import fault

_TOLERANCE: Final = 1e-6
"""Of float32 prices that are added up in float64, relative to the largest term."""

_SPLITS: Final[Mapping[str, Callable[[int], Ranks]]] = {
    "two micro-batches": lambda number: [[range(number // 2), range(number // 2, number)]],
    "a micro-batch for each sequence": lambda number: [[[index] for index in range(number)]],
    "one sequence in a micro-batch of its own": lambda number: [[range(number - 1), [number - 1]]],
    "two ranks": lambda number: [[range(0, number, 2)], [range(1, number, 2)]],
    "three ranks with several micro-batches": lambda number: [
        [[index] for index in range(rank, number, 3)] for rank in range(3)
    ],
    "a rank with nothing to do": lambda number: [[range(number)], []],
    "the sequences reversed": lambda number: [[range(number - 1, -1, -1)]],
    "the second half first": lambda number: [[[*range(number // 2, number), *range(number // 2)]]],
}


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


def same_prices(first: Part, second: Part) -> bool:
    """True if prices and gradients are equal, bit for bit."""
    return torch.equal(first.loss.loss_N, second.loss.loss_N) and torch.equal(gradient_of(first), gradient_of(second))


def expect_inputs_left(algorithm: Algorithm, part: Part, batch: Batch) -> None:
    """Fault tensors that pricing a batch has changed."""
    advantages_N = batch.advantages_of_decisions()
    if isinstance(algorithm, AdvantageEstimator):
        advantages_N = torch.cat([each.advantages_n for each in estimated(algorithm, batch)])
    is_recomputed = algorithm.old_logprobs == "recompute"
    for name, seen_N, given_N in (
        ("logprobs_N", part.decided.logprobs_N, batch.logprobs_N),
        ("behaviour_logprobs_N", part.known.behaviour_logprobs_N, batch.behaviour_logprobs_N),
        ("advantages_N", part.known.advantages_N, advantages_N),
        ("entropy_N", part.decided.entropy_N, batch.entropy_N),
        ("old_logprobs_N", part.old_logprobs_N, batch.old_logprobs_N if is_recomputed else None),
    ):
        if seen_N is not None and given_N is not None and not torch.equal(seen_N, given_N):
            fault(f"loss changed decisions.{name} in place; work on a copy (no method that ends in _)")


def expect_old_logprobs_used(algorithm: Algorithm, batch: Batch) -> None:
    """Fault old log-probs that are asked for and change nothing: stale samples would go uncorrected."""
    if algorithm.old_logprobs == "recompute" or batch.behaviour_logprobs_N is None:
        other = attrs.evolve(batch, old_logprobs_N=batch.old_logprobs_N + 0.03)
    else:
        other = attrs.evolve(batch, behaviour_logprobs_N=batch.behaviour_logprobs_N + 0.03)
    if same_prices(price_all(algorithm, batch), price_all(algorithm, other)):
        fault(
            f"old_logprobs = {algorithm.old_logprobs!r}, but prices and gradients are the same whatever "
            "decisions.old_logprobs_N holds; compare log-probs with it, never with themselves detached, or "
            "declare old_logprobs = 'none'"
        )


def expect_entropy_used(algorithm: Algorithm, batch: Batch) -> None:
    """Fault an entropy that is asked for and moves nothing: it costs memory for the whole vocabulary."""
    other = attrs.evolve(batch, entropy_N=batch.entropy_N.flip(0) + 0.5)
    first, second = price_all(algorithm, batch), price_all(algorithm, other)
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


def expect_direction(algorithm: Algorithm, batch: Batch, scale: float | None, *, is_rolled_out: bool) -> None:
    """Fault on-policy gradients that are not minus the advantages, times `scale` if one is given."""
    advantages_N = price_all(algorithm, batch).known.advantages_N
    gradient_N = gradient_of(price_all(algorithm, batch))
    if is_rolled_out:
        # The part that changes sign with the advantage.
        against_N = gradient_of(price_all(algorithm, attrs.evolve(batch, strength=-1.0)))
        gradient_N = (gradient_N - against_N) / 2.0
    for advantage, gradient in zip(advantages_N.tolist(), gradient_N.tolist(), strict=True):
        if gradient * advantage >= 0.0:
            fault(
                f"on-policy, a decision with advantage {advantage:g} has a policy gradient of {gradient:g}, where "
                f"{-advantage:g} is expected; {_direction(gradient)}"
            )
    if scale is not None:
        _expect_scale(-gradient_N / advantages_N, scale)


def _direction(gradient: float) -> str:
    if gradient == 0.0:
        return "nothing would be learnt: decisions.logprobs_N was detached, or a bound cuts the gradient off on-policy"
    return "the sign is wrong, so good decisions would become less likely: a loss is minimised, return minus the gain"


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


def expect_no_gradient_on_policy(algorithm: Algorithm, batch: Batch) -> None:
    """Fault gradients of decisions whose advantages are 0, but for rounding."""
    part = price_all(algorithm, attrs.evolve(batch, strength=0.0))
    gradient_N = gradient_of(part)
    place = int(gradient_N.abs().argmax())
    if not abs(gradient_N[place].item()) <= 1e-6:
        fault(
            f"on-policy, a decision with advantage 0 has a gradient of {gradient_N[place].item():g} at "
            f"{part.situation(place)}; multiply the policy term by the advantage alone, or, if the loss has a term "
            "that does not depend on advantages, set has_other_terms = True in the test class"
        )


def expect_exactly_no_gradient(algorithm: Algorithm, batch: Batch) -> None:
    """Fault any gradient of decisions whose advantages are 0; one that is not finite is told by another check."""
    part = price_all(algorithm, batch)
    gradient_N = gradient_of(part)
    wrong = torch.nonzero(gradient_N.isfinite() & (gradient_N != 0.0))
    if len(wrong):
        place = int(wrong[0])
        fault(
            f"skips_zero_advantage is declared, but a decision with advantage 0 has a gradient of "
            f"{gradient_N[place].item():g} at {part.situation(place)}; declare skips_zero_advantage = False, or "
            "take out the term that does not vanish with the advantage"
        )


def expect_terms_apart(algorithm: Algorithm, batch: Batch) -> None:
    """Fault a policy term that does not vanish with its advantage, beside terms that do not depend on any."""
    none_N, plus_N, minus_N = (
        gradient_of(price_all(algorithm, attrs.evolve(batch, strength=strength))) for strength in (0.0, 1.0, -1.0)
    )
    if not torch.allclose(none_N, (plus_N + minus_N) / 2.0, rtol=1e-4, atol=1e-6):
        fault(
            "with advantage 0, the gradient is not the part of the loss that does not depend on advantages; a "
            "policy term must vanish with its advantage"
        )


def expect_finite(part: Part) -> None:
    """Fault a price, a gradient or a metric that is no finite number."""
    metrics = {f"metric {name!r}": values_N for name, values_N in part.loss.metrics.items()}
    for name, values_N in {"price": part.loss.loss_N, "gradient": gradient_of(part), **metrics}.items():
        place = first_nonfinite(values_N)
        if place is not None:
            fault(
                f"the {name} of a decision is {values_N[place].item()} at {part.situation(place)}; bound log "
                "ratios (clamp(-20, 20)) before their exponential, and never multiply infinity by 0"
            )


def expect_own_logprobs(part: Part, batch: Batch, *, couples: bool) -> None:
    """Fault prices that depend on log-probs of other decisions, or of other sequences where a sequence `couples`."""
    sequences = part.known.sequence_N.tolist()
    for place, one_N in enumerate(torch.eye(len(sequences))):
        gradient_N = gradient_of(part, one_N)
        gradient_N[list(batch.decisions_of(sequences[place])) if couples else [place]] = 0.0
        if gradient_N.any():
            other = int(gradient_N.abs().argmax())
            advice = (
                "sequences are priced one by one"
                if couples
                else "price each alone, or set couples_decisions = True in the test class if its sequence is "
                "priced as one"
            )
            fault(
                f"the price of decision {place} (sequence {sequences[place]}) has a gradient with respect to the "
                f"log-prob of decision {other} (sequence {sequences[other]}); {advice}"
            )


def expect_formula(part: Part, decisions: Decisions, expected_N: torch.Tensor) -> None:
    """Fault prices and gradients that are not those of a formula over `decisions`."""
    (gradient_N,) = torch.autograd.grad(expected_N.sum(), decisions.logprobs_N, materialize_grads=True)
    for name, seen_N, right_N in (
        ("price", part.loss.loss_N.detach(), expected_N.detach()),
        ("gradient", gradient_of(part), gradient_N),
    ):
        error_N = (seen_N - right_N).abs() - 1e-4 * right_N.abs()
        place = int(error_N.argmax())
        if error_N[place] > 1e-5:
            fault(
                f"the {name} of a decision is {seen_N[place].item():.6g} and its reference "
                f"{right_N[place].item():.6g} at {part.situation(place)}"
            )


def in_float64(algorithm: Algorithm, part: Part) -> Decisions:
    """The decisions that the algorithm saw, in double precision, with a gradient of its own."""
    known, decided = part.known, part.decided
    logprobs_N = decided.logprobs_N.detach().double().requires_grad_()
    frozen_N = {role: said.logprobs_N.double() for role, said in part.frozen.items()}
    return Decisions(
        logprobs_N=logprobs_N,
        behaviour_logprobs_N=known.behaviour_logprobs_N.double(),
        old_logprobs_N=_double(part.old_logprobs_N),
        entropy_N=_double(decided.entropy_N),
        advantages_N=known.advantages_N.double(),
        sequence_N=known.sequence_N,
        num_sequences=known.num_sequences,
        values_N=_double(decided.values_N),
        frozen=outputs(algorithm, Decided(logprobs_N=logprobs_N, entropy_N=None), frozen_N),
        targets_N=_double(known.targets_N),
    )


def _double(values_N: torch.Tensor | None) -> torch.Tensor | None:
    return None if values_N is None else values_N.detach().double()


def expect_same_step(algorithm: Algorithm, batch: Batch, *, is_cut: bool) -> None:
    """Fault a step's loss or gradient that depends on how its batch lies; with `is_cut`, sequences may be cut."""
    number = len(batch.lengths)
    whole = train(algorithm, batch, [[range(number)]])
    own = "price each decision from its own sequence alone; averages over the batch are `aggregation`'s"
    steps = [(name, train(algorithm, batch, split(number)), own) for name, split in _SPLITS.items()]
    if is_cut:
        advice = (
            "price each decision by itself (`settle` is told of whole sequences), or declare payload_kinds = "
            "frozenset({'tokens'})"
        )
        cut = train(algorithm, batch, [[range(number)]], longest=2)
        steps.append(("sequences cut after two decisions", cut, advice))
    for name, parts, advice in steps:
        if not abs(parts.loss - whole.loss) <= _TOLERANCE * whole.magnitude:
            fault(f"the loss of a batch is {whole.loss:.6g} in one piece, and {parts.loss:.6g} with {name}; {advice}")
        difference_N = (parts.gradient_N - whole.gradient_N).abs()
        place = int(difference_N.argmax())
        if not difference_N[place] <= _TOLERANCE * whole.gradient_N.abs().max():
            fault(
                f"the gradient of a decision is {whole.gradient_N[place].item():.6g} with the batch in one piece, and "
                f"{parts.gradient_N[place].item():.6g} with {name}; {advice}"
            )
