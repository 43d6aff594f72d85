"""The tests of the prices that an algorithm gives to decisions, and of their gradients.

Shape legend: N decisions of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Final

import attrs
import pytest
import torch

from cosmos_core.protocols import Algorithm, AlgorithmCapabilities, Decisions
from cosmos_core.protocols.algorithm import AdvantageEstimator
from cosmos_core.testing.conformance.algorithm.batch import (
    Batch,
    Priced,
    draw,
    extreme,
    lay_out,
    outputs,
    priced,
    trained,
)
from cosmos_core.testing.conformance.algorithm.calls import (
    calling,
    consulted,
    plain,
    properties_of,
    settled,
    summarised,
)
from cosmos_core.testing.conformance.plugin import Make, fault, told_by

_TOLERANCE: Final = 1e-6
"""Of float32 prices that are added up in float64, relative to the largest term."""


class PriceTests:
    """Tests of prices; the kit tells of the attributes and of `reference`."""

    on_policy_scale: ClassVar[float | None] = 1.0
    couples_decisions: ClassVar[bool] = False
    ignores: ClassVar[frozenset[str]] = frozenset()
    has_other_terms: ClassVar[bool] = False

    def reference(self, decisions: Decisions) -> torch.Tensor | None:  # noqa: ARG002 - for those who override it
        """The price of each decision by the formula of the paper, in float64; None if there is none to compare with."""
        return None

    @pytest.fixture
    def batch(self, capabilities: AlgorithmCapabilities) -> Batch:
        """A step's batch, slightly off-policy."""
        return draw(capabilities)

    @pytest.fixture
    def trainable(self, algorithm: Algorithm, batch: Batch) -> Algorithm:
        """The algorithm, if it prices a batch at all."""
        with told_by("test_declarations_mean_something and test_every_decision_gets_a_price"):
            properties_of(algorithm)
            priced(algorithm, batch)
            return algorithm

    def test_an_estimate_depends_on_what_was_summarised_alone(
        self, make: Make, trainable: Algorithm, batch: Batch
    ) -> None:
        """Other sequences lie in other processes; the trainer prices decisions from the same tensors."""
        if not isinstance(trainable, AdvantageEstimator):
            pytest.skip("it has no summarise and settle")
        taken, other = batch.taken(trainable), make()
        before = plain(taken)
        first = plain(settled(other, summarised(other, taken), taken))
        if plain(taken) != before:
            fault("summarise or settle changed log-probs or values in place; work on a copy (no method that ends in _)")
        said, places = summarised(make(), taken), range(len(taken))
        for when, order in (
            ("by an instance that summarised nothing", places),
            ("in another order", places[::-1]),
            ("of the last sequence alone", places[-1:]),
        ):
            again = plain(settled(make(), said, [taken[place] for place in order]))
            if again != [first[place] for place in order]:
                fault(
                    f"estimates made {when} differ; keep no state, and tell of other sequences what is needed by the "
                    "numbers of summarise"
                )

    def test_every_decision_gets_a_price(
        self, algorithm: Algorithm, batch: Batch, capabilities: AlgorithmCapabilities
    ) -> None:
        """Of a micro-batch, from nothing but what the algorithm asked for, and finite however far off-policy."""
        properties_of(algorithm)
        priced(algorithm, batch)
        _expect_finite(priced(algorithm, extreme(capabilities)))

    def test_what_it_asks_for_is_used(self, trainable: Algorithm, batch: Batch) -> None:
        """Else stale samples go uncorrected, or a forward, the memory of entropies or a whole model is paid in vain."""
        asked: dict[str, tuple[dict[str, Any], str]] = {}
        for role in consulted(trainable):
            frozen_N = {**batch.frozen_N, role: batch.frozen_N[role] + 0.2}
            asked[role] = ({"frozen_N": frozen_N}, f"use decisions.frozen[{role!r}]")
        if trainable.old_logprobs != "none":
            name = "behaviour_logprobs_N" if trainable.old_logprobs == "behaviour" else "old_logprobs_N"
            advice = "compare log-probs with decisions.old_logprobs_N, never with themselves detached"
            asked["old_logprobs"] = ({name: getattr(batch, name) + 0.03}, advice)
        if trainable.needs_entropy:
            advice = "make decisions.entropy_N a factor of a term that has a gradient: detached, it moves nothing"
            asked["entropy"] = ({"entropy_N": batch.entropy_N.flip(0) + 0.5}, advice)
        gradient_N = priced(trainable, batch).gradient()
        for name, (changes, advice) in asked.items():
            other_N = priced(trainable, attrs.evolve(batch, **changes)).gradient()
            if name not in self.ignores and torch.equal(gradient_N, other_N):
                fault(
                    f"{name} is asked for, but gradients are the same whatever it is; {advice}, do not ask for it, or, "
                    f"if it is only to be reported, set ignores = frozenset({{{name!r}}}) in the test class"
                )

    def test_the_same_decisions_cost_the_same_each_time(self, make: Make, trainable: Algorithm, batch: Batch) -> None:
        """In every replica, at different times, after a restart; the trainer reports from the same tensors after."""
        before = properties_of(trainable)
        first, used, (given,) = priced(trainable, batch), make(), plain([lay_out(trainable, batch)])
        (seen,) = plain([first.decisions])
        if changed := [name for name in seen if seen[name] != given[name]]:
            fault(f"loss changed decisions.{', '.join(changed)} in place; work on a copy (no method that ends in _)")
        for when, after in (("after a loss", properties_of(trainable)), ("in another instance", properties_of(make()))):
            if changed := [name for name, value in before.items() if value != after[name]]:
                fault(f"{', '.join(changed)} changed {when}; set them once, from options and context alone")
        priced(used, attrs.evolve(batch, logprobs_N=batch.logprobs_N - 1.0))
        for when, again in (("again", trainable), ("after others", used), ("by another instance", make())):
            if priced(again, batch).numbers() != first.numbers():
                fault(
                    f"the same decisions priced {when} cost something else; loss must depend on nothing but `decisions`"
                )

    def test_minimising_the_loss_makes_good_decisions_likelier(
        self, trainable: Algorithm, capabilities: AlgorithmCapabilities
    ) -> None:
        """On-policy, the gradient of a price is minus its advantage, times `on_policy_scale`; 0 where that is 0."""
        if not capabilities.needs_rewards:
            pytest.skip("needs_rewards is False: it learns from something else than advantages")
        batch, is_rolled_out = draw(capabilities, drift=0.0), capabilities.source == "rollouts"
        whole = priced(trainable, batch)
        gradient_N, advantages_N = whole.gradient(), whole.decisions.advantages_N
        if is_rolled_out:
            # The part that changes sign with the advantage, and the one that depends on none.
            against_N = priced(trainable, attrs.evolve(batch, strength=-1.0)).gradient()
            other_N, gradient_N = (gradient_N + against_N) / 2.0, (gradient_N - against_N) / 2.0
        _expect_direction(gradient_N, advantages_N, self.on_policy_scale)
        if not is_rolled_out:
            return
        skips = trainable.skips_zero_advantage
        none = priced(trainable, extreme(capabilities, [0.0]) if skips else attrs.evolve(batch, strength=0.0))
        none_N = none.gradient()
        if skips:
            # One that is not finite is told by another test.
            none_N = none_N.nan_to_num(0.0, 0.0, 0.0)
        place = int(none_N.abs().argmax())
        if skips or not self.has_other_terms:
            if not none_N[place].abs() <= (0.0 if skips else 1e-6):
                fault(
                    f"{'skips_zero_advantage is declared, but' if skips else 'on-policy,'} a decision with advantage 0 "
                    f"has a gradient of {none_N[place].item():g} at {none.situation(place)}; multiply the policy term "
                    "by the advantage alone, or, if the loss has a term that does not depend on advantages, set "
                    "skips_zero_advantage = False, and has_other_terms = True in the test class"
                )
        elif self.on_policy_scale is not None and not torch.allclose(none_N, other_N, rtol=1e-4, atol=1e-6):
            fault(
                "with advantage 0, the gradient is not the part of the loss that does not depend on advantages; a "
                "policy term must vanish with its advantage"
            )

    def test_the_price_of_a_decision_depends_on_its_own_log_prob_only(self, trainable: Algorithm, batch: Batch) -> None:
        """Averages are the trainer's; with `couples_decisions`, a price may depend on all of its own sequence."""
        whole = priced(trainable, batch)
        sequence_N, one_NN = whole.decisions.sequence_N, torch.eye(len(batch.logprobs_N))
        own_NN = sequence_N[:, None] == sequence_N if self.couples_decisions else one_NN.bool()
        gradient_NN = torch.stack([whole.gradient(one_N) for one_N in one_NN])
        for place, other in torch.nonzero(gradient_NN.masked_fill(own_NN, 0.0)).tolist():
            advice = (
                "sequences are priced one by one"
                if self.couples_decisions
                else "price each alone, or set couples_decisions = True in the test class if it is priced as one"
            )
            fault(
                f"the price of decision {place} (sequence {sequence_N[place]}) has a gradient with respect to the "
                f"log-prob of decision {other} (sequence {sequence_N[other]}); {advice}"
            )

    def test_the_loss_equals_its_reference(self, trainable: Algorithm, capabilities: AlgorithmCapabilities) -> None:
        """Price and gradient are those of the formula that the author wrote down in float64, on and off-policy."""
        for drift in (0.0, 0.05, 0.5):
            whole = priced(trainable, draw(capabilities, drift=drift))
            decisions = _in_float64(trainable, whole.decisions)
            expected_N = self.reference(decisions)
            if expected_N is None:
                pytest.skip("no reference: override reference(decisions) to compare with a formula")
            (gradient_N,) = torch.autograd.grad(expected_N.sum(), decisions.logprobs_N, materialize_grads=True)
            for name, seen_N, right_N in (
                ("price", whole.loss.loss_N.detach(), expected_N.detach()),
                ("gradient", whole.gradient(), gradient_N),
            ):
                error_N = (seen_N - right_N).abs() - 1e-4 * right_N.abs()
                place = int(error_N.argmax())
                if error_N[place] > 1e-5:
                    fault(
                        f"the {name} of a decision is {seen_N[place].item():.6g} and its reference "
                        f"{right_N[place].item():.6g} at {whole.situation(place)}"
                    )

    def test_a_step_does_not_depend_on_how_its_batch_lies(
        self, trainable: Algorithm, capabilities: AlgorithmCapabilities, batch: Batch
    ) -> None:
        """Micro-batches are a matter of memory, ranks come and go, packing orders; latents are cut, tokens never."""
        everything = range(len(batch.lengths))
        middle, alone = len(everything) // 2, [[index] for index in everything]
        split: dict[str, Sequence[Sequence[int]]] = {
            "two micro-batches": [everything[:middle], everything[middle:]],
            "a micro-batch for each sequence": alone,
            "one sequence in a micro-batch of its own": [everything[:-1], everything[-1:]],
            "two ranks": [everything[::2], everything[1::2]],
            "three ranks with several micro-batches": [*alone[::3], *alone[1::3], *alone[2::3]],
            "the sequences reversed": [everything[::-1]],
            "the second half first": [[*everything[middle:], *everything[:middle]]],
        }
        layouts = {name: [batch.places(each) for each in micro_batches] for name, micro_batches in split.items()}
        if "latents" in capabilities.payload_kinds:
            pairs = [slice(first, first + 2) for first in range(0, max(batch.lengths), 2)]
            layouts["sequences cut after two decisions"] = [batch.places(everything, pair) for pair in pairs]
        terms_N, gradient_N = trained(trainable, batch, [batch.places(everything)])
        for name, micro_batches in layouts.items():
            other_terms_N, other_N = trained(trainable, batch, micro_batches)
            place = int((other_N - gradient_N).abs().argmax())
            for what, whole, parts, size_N in (
                ("loss of the batch", terms_N.sum(), other_terms_N.sum(), terms_N.abs().sum()),
                ("gradient of a decision", gradient_N[place], other_N[place], gradient_N.abs().max()),
            ):
                if not (parts - whole).abs() <= _TOLERANCE * size_N:
                    fault(
                        f"the {what} is {whole.item():.6g} in one piece, and {parts.item():.6g} with {name}; price "
                        "each decision from its own sequence alone (averages over the batch are `aggregation`'s), and "
                        "where payload_kinds has 'latents' by itself: `settle` is told of whole sequences"
                    )

    def test_demonstrations_become_likelier(
        self, make: Make, algorithm: Algorithm, capabilities: AlgorithmCapabilities
    ) -> None:
        """From log-probs alone, at finite prices, however they lie; every replica reads as many of them."""
        with calling("reading num_demonstrations"):
            numbers: list[object] = [algorithm.num_demonstrations, make().num_demonstrations]
        if not isinstance(numbers[0], int) or isinstance(numbers[0], bool) or numbers[0] < 0 or len({*numbers}) > 1:
            fault(
                f"num_demonstrations is {numbers[0]!r}, and {numbers[1]!r} in another instance; give an integer of at "
                "least 0, by the options alone"
            )
        if numbers[0] == 0:
            pytest.skip("with these options it imitates nothing beside rollouts (`num_demonstrations`)")
        if capabilities.source != "rollouts":
            fault(f"it imitates, and learns from {capabilities.source}: these are its batch; price them in loss")
        batch = draw(capabilities)
        whole = priced(algorithm, batch, is_imitated=True)
        gradient_N = whole.gradient()
        if bool((gradient_N > 0).any()) or not bool((gradient_N < 0).any()):
            fault(
                f"the gradients of the prices of demonstrations by their log-probs are {gradient_N.tolist()[:6]}…; a "
                "demonstration that becomes likelier must not cost more, and some must cost less"
            )
        _expect_finite(priced(algorithm, extreme(capabilities), is_imitated=True))
        halves = [batch.places(range(3)), batch.places(range(3, len(batch.lengths)))]
        parts_N = torch.cat([priced(algorithm, batch, half, is_imitated=True).loss.loss_N for half in halves])
        if not torch.allclose(parts_N, whole.loss.loss_N, rtol=1e-5, atol=1e-6):
            fault(
                "prices of demonstrations change with what else is in the micro-batch; price each decision from its "
                "own sequence alone; averages are `aggregation`'s"
            )


def _expect_direction(gradient_N: torch.Tensor, advantages_N: torch.Tensor, scale: float | None) -> None:
    """Fault policy gradients that are not minus the advantages, times `scale` if one is given."""
    for advantage, gradient in zip(advantages_N.tolist(), gradient_N.tolist(), strict=True):
        if gradient * advantage >= 0.0:
            why = "the sign is wrong: a loss is minimised, return minus the gain"
            if gradient == 0.0:
                why = "nothing would be learnt: decisions.logprobs_N was detached, or a bound cuts the gradient off"
            fault(
                f"on-policy, a decision with advantage {advantage:g} has a policy gradient of {gradient:g}, where "
                f"{-advantage:g} is expected; {why}"
            )
    factors_N = -gradient_N / advantages_N
    if scale is not None and not torch.allclose(factors_N, torch.full_like(factors_N, scale), rtol=1e-4, atol=1e-5):
        fault(
            f"on-policy, the policy gradient is {factors_N.min().item():g} times minus the advantage for one decision "
            f"and {factors_N.max().item():g} times for another, expected {scale:g} times for each; find the factor, "
            "divide by no length and by no count (`aggregation` weighs decisions), or set on_policy_scale in the test "
            "class if it is meant (None if decisions are meant to weigh differently)"
        )


def _expect_finite(whole: Priced) -> None:
    """Fault a price, a gradient or a metric that is no finite number."""
    metrics = {f"metric {name!r}": values_N for name, values_N in whole.loss.metrics.items()}
    for name, values_N in {"price": whole.loss.loss_N, "gradient": whole.gradient(), **metrics}.items():
        for place in torch.nonzero(~values_N.isfinite()).flatten().tolist():
            fault(
                f"the {name} of a decision is {values_N[place].item()} at {whole.situation(place)}; bound log "
                "ratios (clamp(-20, 20)) before their exponential, and never multiply infinity by 0"
            )


def _in_float64(algorithm: Algorithm, seen: Decisions) -> Decisions:
    """The decisions that an algorithm saw, in double precision, with a gradient of its own."""
    doubled: dict[str, Any] = {
        name: value.detach().double()
        for name, value in attrs.asdict(seen, recurse=False).items()
        if isinstance(value, torch.Tensor) and value.is_floating_point()
    }
    doubled["logprobs_N"].requires_grad_()
    frozen_N = {role: said.logprobs_N.double() for role, said in seen.frozen.items()}
    return attrs.evolve(seen, **doubled, frozen=outputs(algorithm, doubled["logprobs_N"], frozen_N))
