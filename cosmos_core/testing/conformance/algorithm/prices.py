"""The tests of the prices that an algorithm gives to decisions, and of their gradients.

Shape legend: N decisions of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import attrs
import pytest
import torch

from cosmos_core.policy.training.old_logprobs import Evaluated
from cosmos_core.protocols import Algorithm, AlgorithmCapabilities, Decisions
from cosmos_core.protocols.algorithm import AdvantageEstimator
from cosmos_core.protocols.frozen import FrozenOutput
from cosmos_core.testing.conformance.algorithm.batch import (
    Batch,
    Priced,
    comparison,
    consulted,
    draw,
    estimated,
    extreme,
    laid,
    plain,
    priced,
    properties_of,
    trained,
)
from cosmos_core.testing.conformance.plugin import Make, fault, told_by


class PriceTests:
    """Tests of prices; the kit tells of the attributes and of `reference`."""

    on_policy_scale: ClassVar[float | None] = 1.0
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
        before, said = laid(trainable, batch, [batch.whole]), list[bytes]()

        def exchange(own: bytes) -> list[bytes]:
            said.append(own)
            return said

        here = estimated(make(), laid(trainable, batch, [batch.whole]), exchange)
        if _told(here) != _told(before):
            fault("summarise or settle changed log-probs or values in place; work on a copy (no method that ends in _)")
        few = batch.cut([*range(len(batch.lengths))][:-3:-1])
        there = estimated(make(), laid(trainable, batch, [few]), lambda _: said)
        places_N, (all_known,), (few_known,) = few.inputs["places"], here.prepared.known, there.prepared.known
        for name in ("advantages_N", "targets_N"):
            all_N, few_N = getattr(all_known, name), getattr(few_known, name)
            if all_N is not None and not torch.equal(all_N[places_N], few_N):
                fault(
                    f"estimates ({name}) made in a process that has only the last two sequences, in another order, "
                    "differ; keep no state, and tell of other sequences what is needed by the numbers of summarise"
                )

    def test_every_decision_gets_a_price(
        self, algorithm: Algorithm, batch: Batch, capabilities: AlgorithmCapabilities
    ) -> None:
        """A micro-batch is priced from nothing but what was asked for; prices are finite however far off-policy."""
        properties_of(algorithm)
        priced(algorithm, batch)
        _expect_finite(*priced(algorithm, extreme(capabilities)))

    def test_what_it_asks_for_is_used(self, trainable: Algorithm, batch: Batch) -> None:
        """If not, stale samples go uncorrected, or a forward, memory of entropies or a whole model is paid in vain."""
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
        gradient_N = _gradient(trainable, batch)
        for name, (changes, advice) in asked.items():
            other_N = _gradient(trainable, attrs.evolve(batch, **changes))
            if name not in self.ignores and torch.equal(gradient_N, other_N):
                fault(
                    f"{name} is asked for, but gradients are the same whatever it is; {advice}, do not ask for it, or, "
                    f"if it is only to be reported, set ignores = frozenset({{{name!r}}}) in the test class"
                )

    def test_minimising_the_loss_makes_good_decisions_likelier(
        self, trainable: Algorithm, capabilities: AlgorithmCapabilities
    ) -> None:
        """On-policy, the gradient of a price is minus its advantage, times `on_policy_scale`; 0 where that is 0."""
        if not capabilities.needs_rewards:
            pytest.skip("needs_rewards is False: it learns from something else than advantages")
        batch, is_rolled_out = draw(capabilities, drift=0.0), capabilities.source == "rollouts"
        (whole,) = priced(trainable, batch)
        gradient_N, advantages_N = whole.gradient(), whole.decisions.advantages_N
        if not is_rolled_out:
            _expect_direction(gradient_N, advantages_N, self.on_policy_scale)
            return
        # The part that changes sign with the advantage, and the one that depends on none.
        against_N = _gradient(trainable, attrs.evolve(batch, strength=-1.0))
        other_N, gradient_N = (gradient_N + against_N) / 2.0, (gradient_N - against_N) / 2.0
        _expect_direction(gradient_N, advantages_N, self.on_policy_scale)
        skips, has_others = trainable.skips_zero_advantage, self.has_other_terms
        without = extreme(capabilities, [0.0]) if skips else attrs.evolve(batch, strength=0.0)
        (none,) = priced(trainable, without)
        # One that is not finite is told by another test.
        none_N = none.gradient().nan_to_num(0.0, 0.0, 0.0)
        expected_N = other_N if has_others and not skips else torch.zeros_like(none_N)
        error_N = (none_N - expected_N).abs() - 1e-4 * expected_N.abs()
        place = int(error_N.argmax())
        is_known = skips or not has_others or self.on_policy_scale is not None
        if is_known and error_N[place] > (0.0 if skips else 1e-6):
            fault(
                f"{'skips_zero_advantage is declared, but' if skips else 'on-policy,'} a decision with advantage 0 "
                f"has a gradient of {none_N[place].item():g} at {none.situation(place)}, and not of "
                f"{expected_N[place].item():g}; a policy term must vanish with its advantage: multiply it by that "
                "alone, or, if the loss has a term that does not depend on advantages, set skips_zero_advantage = "
                "False, and has_other_terms = True in the test class"
            )

    def test_the_loss_equals_its_reference(self, trainable: Algorithm, capabilities: AlgorithmCapabilities) -> None:
        """Price and gradient are those of the formula that the author wrote down in float64, on and off-policy."""
        for drift in (0.0, 0.05, 0.5):
            (whole,) = priced(trainable, draw(capabilities, drift=drift))
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
            "two ranks": [everything[::2], everything[1::2]],
            "three ranks with several micro-batches": [*alone[::3], *alone[1::3], *alone[2::3]],
            "the sequences reversed": [everything[::-1]],
        }
        layouts = {name: [batch.cut(each) for each in micro_batches] for name, micro_batches in split.items()}
        if "latents" in capabilities.payload_kinds:
            pairs = [slice(first, first + 2) for first in range(0, max(batch.lengths), 2)]
            layouts["sequences cut after two decisions"] = [batch.cut(everything, pair) for pair in pairs]
        for is_imitated in (False, True)[: 1 + bool(trainable.num_demonstrations)]:
            terms_N, gradient_N = trained(trainable, batch, [batch.whole], is_imitated=is_imitated)
            for name, micro_batches in layouts.items():
                other_terms_N, other_N = trained(trainable, batch, micro_batches, is_imitated=is_imitated)
                for what, whole_N, parts_N in (("loss", terms_N, other_terms_N), ("gradient", gradient_N, other_N)):
                    apart_N = (parts_N - whole_N).abs()
                    place = int(apart_N.argmax())
                    # Of float32 prices that are added up in float64.
                    if not apart_N[place] <= 1e-6 * whole_N.abs().max():
                        fault(
                            f"the {what} of a decision is {whole_N[place].item():.6g} in one piece, and "
                            f"{parts_N[place].item():.6g} with {name}; price each "
                            f"{'demonstration' if is_imitated else 'decision'} from its own sequence alone (averages "
                            "over the batch are `aggregation`'s), and where payload_kinds has 'latents' by itself: "
                            "`settle` is told of whole sequences"
                        )

    def test_demonstrations_become_likelier(self, algorithm: Algorithm, capabilities: AlgorithmCapabilities) -> None:
        """Imitation prices demonstrations from log-probs alone, and its prices are finite."""
        if properties_of(algorithm)["num_demonstrations"] == 0:
            pytest.skip("with these options it imitates nothing beside rollouts (`num_demonstrations`)")
        if capabilities.source != "rollouts":
            fault(f"it imitates, and learns from {capabilities.source}: these are its batch; price them in loss")
        (whole,) = priced(algorithm, draw(capabilities), is_imitated=True)
        gradient_N = whole.gradient()
        if bool((gradient_N > 0).any()) or not bool((gradient_N < 0).any()):
            fault(
                f"the gradients of the prices of demonstrations by their log-probs are {gradient_N.tolist()[:6]}…; a "
                "demonstration that becomes likelier must not cost more, and some must cost less"
            )
        _expect_finite(*priced(algorithm, extreme(capabilities), is_imitated=True))


def _gradient(algorithm: Algorithm, batch: Batch) -> torch.Tensor:
    (whole,) = priced(algorithm, batch)
    return whole.gradient()


def _told(part: Evaluated) -> list[object]:
    """All that an algorithm that estimates is told of sequences, to be compared."""
    behaviour = [known.behaviour_logprobs_N.tolist() for known in part.prepared.known]
    return [behaviour, *(plain(each) for said in (part.old, *part.frozen.values()) for each in said)]


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
    frozen, own_N = {}, doubled["logprobs_N"]
    for role, asked in consulted(algorithm).items():
        other_N = seen.frozen[role].logprobs_N.double()
        frozen[role] = FrozenOutput(logprobs_N=other_N, **comparison(asked, own_N, other_N))
    return attrs.evolve(seen, **doubled, frozen=frozen)
