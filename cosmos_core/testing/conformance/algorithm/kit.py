"""The kit for algorithms."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Final

import attrs
import pytest
import torch

from cosmos_core.config.dynamic import DynamicKey, dynamic_keys
from cosmos_core.config.structure import structure
from cosmos_core.errors import ConfigError
from cosmos_core.protocols import Algorithm, AlgorithmCapabilities, AlgorithmContext, Decisions, Kind, Provider
from cosmos_core.protocols.algorithm import AdvantageEstimator, Estimate, Taken
from cosmos_core.testing.conformance.algorithm import declarations, prices
from cosmos_core.testing.conformance.algorithm import groups as of_groups
from cosmos_core.testing.conformance.algorithm.calls import (
    Batch,
    admitted,
    advantages_of,
    calling,
    consulted,
    draw,
    estimates_of,
    expect_advantages,
    extreme,
    properties_of,
    rewards_text,
    settled,
)
from cosmos_core.testing.conformance.algorithm.step import (
    as_demonstrations,
    first_nonfinite,
    gradient_of,
    price_all,
    price_demonstrations,
)
from cosmos_core.testing.conformance.plugin import PluginConformance, fault
from cosmos_core.types import JSON, Group

_STRENGTHS: Final = {
    "rollouts": (0.0, 1.0, -1.0, 1e-6, 1e3, -1e3),
    "demonstrations": (1.0,),
    "preferences": (1.0, -1.0),
}


class AlgorithmConformance(PluginConformance):
    """Tests that every algorithm must pass; no model and no engine is needed.

    Beside `plugin` and `options`, a test class may set or override:

    Attributes:
        on_policy_scale: The gradient of a decision's price is minus its advantage times this, on-policy; 1.0 unless
            set. None if it is no constant: only the sign is tested.
        couples_decisions: Whether the price of a decision depends on the log-probs of its whole sequence, as with
            ratios of sequences; False unless set. Sequences never depend on one another. Of latents it must not: their
            sequences may lie in several micro-batches.
        ignores: What is asked for without changing the loss, only to be reported: `"old_logprobs"`, `"entropy"`, or
            the role of a frozen model.
        rewards_order_advantages: Whether a sample's advantage rises with its own reward, all else the same, in one
            group at least, and falls in none; True unless set.
        has_other_terms: Whether the loss has a term that moves the policy on-policy whatever the advantage, such as a
            bonus; False unless set.
        context: Fixture: the `AlgorithmContext`; by default groups of 4, completions of 16, staleness 2, and groups
            of one without staleness for demonstrations.
        batch: Fixture: the `Batch` that is priced, as `cosmos_core.testing.conformance.algorithm.calls.draw` makes it;
            by default six random sequences, slightly off-policy.
        groups: Fixture: the groups that `admit` is asked about, and that advantages are computed of if it admits
            them; by default ordinary, equal, extreme and unscored rewards.
        reference: Method `reference(decisions) -> tensor`: the price of each decision by the formula of the paper, in
            float64, with a gradient; by default None, and nothing is compared.
    """

    kind: ClassVar[Kind] = "algorithm"
    on_policy_scale: ClassVar[float | None] = 1.0
    couples_decisions: ClassVar[bool] = False
    ignores: ClassVar[frozenset[str]] = frozenset()
    rewards_order_advantages: ClassVar[bool] = True
    has_other_terms: ClassVar[bool] = False

    @pytest.fixture
    def context(self, capabilities: AlgorithmCapabilities) -> AlgorithmContext:
        """The context of a recipe that the algorithm can run in."""
        if capabilities.source != "rollouts":
            size = 2 if capabilities.source == "preferences" else 1
            return AlgorithmContext(group_size=size, temperature=1.0, max_units=16, max_staleness=0)
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
            pytest.skip("no batch can be priced: see the tests of what it declares and of every decision's price")
        return algorithm

    @pytest.fixture
    def groups(self, capabilities: AlgorithmCapabilities, context: AlgorithmContext) -> Sequence[Group]:
        """Finished groups: ordinary rewards, equal ones, far and near ones, some of them unscored."""
        if capabilities.source != "rollouts":
            pytest.skip(f"{capabilities.source} are in no groups")
        return of_groups.sampled_groups(capabilities, context)

    @pytest.fixture
    def kept(self, algorithm: Algorithm, groups: Sequence[Group]) -> Sequence[Group]:
        """The groups that `admit` lets pass: a run asks for advantages of no others."""
        try:
            kept = tuple(group for group in groups if admitted(algorithm, group) is None)
        except pytest.fail.Exception:
            pytest.skip("admit fails: see the test of admission")
        if not kept:
            pytest.skip("admit refuses every group: see the test of admission")
        return kept

    @pytest.fixture
    def estimator(self, algorithm: Algorithm, kept: Sequence[Group]) -> Algorithm:
        """The algorithm, if it gives advantages at all; what one test says need not be said by all."""
        try:
            expect_advantages(algorithm, copy.deepcopy(kept))
        except pytest.fail.Exception:
            pytest.skip("no advantages: see test_scored_samples_have_a_finite_advantage_and_others_none")
        return algorithm

    @pytest.fixture
    def dynamic(self, provider: Provider[Any], options: Mapping[str, JSON]) -> Sequence[DynamicKey]:
        """The options that may change while a run goes on."""
        try:
            found = dynamic_keys(provider.options, structure(options, provider.options, ""), "")
        except ConfigError as error:
            pytest.skip(f"the options are refused: {error}")
        except TypeError as error:
            fault(str(error))
        return found or pytest.skip("no option is dynamic")

    def reference(self, decisions: Decisions) -> torch.Tensor | None:  # noqa: ARG002 - for those who override it
        """The price of each decision by the formula of the paper, in float64; None if there is none to compare with."""
        return None

    # -- what it declares ---------------------------------------------------------------------------------------------

    def test_declarations_mean_something(self, algorithm: Algorithm, capabilities: AlgorithmCapabilities) -> None:
        """`cosmos plan` and the trainer act on capabilities and properties without a second look."""
        declarations.expect_capabilities(capabilities)
        values = properties_of(algorithm)
        if capabilities.source != "rollouts" and values["old_logprobs"] == "behaviour":
            fault("old_logprobs is 'behaviour', but nobody generated a demonstration; use 'none' or 'recompute'")
        consulted(algorithm)

    def test_a_recipe_is_accepted_if_it_gives_what_is_declared(self, capabilities: AlgorithmCapabilities) -> None:
        """A declaration leaves a way to use it, and `cosmos plan` refuses what the algorithm could not use."""
        declarations.expect_planning(self.plugin, capabilities)

    def test_dynamic_options_become_what_they_allow_and_count(
        self, make: Callable[..., Any], dynamic: Sequence[DynamicKey], trainable: Algorithm, request: Any
    ) -> None:
        """A step that was begun before a change is ended with the options of its beginning, in its own instance."""
        assert trainable is not None
        batch, capabilities = (request.getfixturevalue(name) for name in ("batch", "capabilities"))
        batches = [batch, draw(capabilities, drift=0.5), extreme(capabilities, advantages=(1.0, -1.0))]
        groups = request.getfixturevalue("groups") if capabilities.source == "rollouts" else ()
        declarations.expect_dynamic(make, dynamic, batches, groups)

    # -- what it makes of groups --------------------------------------------------------------------------------------

    def test_groups_are_admitted_or_refused_with_a_reason(
        self, make: Callable[..., Any], algorithm: Algorithm, groups: Sequence[Group], context: AlgorithmContext
    ) -> None:
        """Each by itself, in any order and on any replica; something is left to train on."""
        unscored = of_groups.sampled_group(len(groups), [None] * context.group_size, longest=context.max_units)
        for group in (*groups, unscored):
            answer: object = admitted(algorithm, group)
            if answer is not None and not (isinstance(answer, str) and answer):
                fault(
                    f"admit returned {answer!r} for a group with {rewards_text([group])}; return None to train on it, "
                    "or a short reason to drop it, such as 'equal rewards'"
                )
        of_groups.expect_same_admission(algorithm, make(), groups)
        kept = [group for group in groups if admitted(algorithm, group) is None]
        if not kept:
            fault(
                f"admit refuses every group, for example one with {rewards_text(groups[:1])}: "
                f"{admitted(algorithm, groups[0])!r}; return None for the groups to train on, or override the fixture "
                "`groups` with such as it admits"
            )
        if self.rewards_order_advantages and not any(any(values) for values in advantages_of(algorithm, kept)):
            fault(
                f"every advantage is 0, though rewards differ ({rewards_text(kept)}): nothing would be learnt; compute "
                "advantages from sample.reward"
            )

    def test_scored_samples_have_a_finite_advantage_and_others_none(
        self, make: Callable[..., Any], algorithm: Algorithm, kept: Sequence[Group]
    ) -> None:
        """Every replica works them out for itself, and reports the same records afterwards."""
        before = copy.deepcopy(kept)
        first = expect_advantages(algorithm, kept)
        advantages_of(algorithm, kept[::-1])
        if advantages_of(algorithm, kept) != first:
            fault("advantages of the same groups differ at a second call; they must depend on nothing but `groups`")
        if advantages_of(make(), kept) != first:
            fault("two instances give different advantages to the same groups; draw no random numbers, keep no state")
        for group in kept:
            admitted(algorithm, group)
        if kept != before:
            fault("advantages or admit changed the groups that they were given; work on a copy")

    def test_unscored_samples_take_no_part_in_their_group(
        self,
        estimator: Algorithm,
        kept: Sequence[Group],
        capabilities: AlgorithmCapabilities,
        context: AlgorithmContext,
    ) -> None:
        """A reward that failed says nothing of the other samples, and is neither a bad answer nor a good one."""
        fewest = max(1, capabilities.min_group_size)
        of_groups.expect_unscored_take_no_part(estimator, kept, fewest)
        if context.group_size > fewest:
            of_groups.expect_unscored_are_no_zeros(estimator, context)
        of_groups.expect_status_counts(estimator, kept)

    def test_a_higher_reward_never_lowers_the_advantage_of_its_sample(
        self, estimator: Algorithm, kept: Sequence[Group], capabilities: AlgorithmCapabilities
    ) -> None:
        """Advantages are all that a policy learns of its rewards; in some group a higher reward must show."""
        if not capabilities.needs_rewards or not self.rewards_order_advantages:
            pytest.skip("needs_rewards or rewards_order_advantages is False")
        of_groups.expect_order_of_rewards(estimator, kept)

    def test_an_estimate_depends_on_what_was_summarised_alone(
        self, make: Callable[..., Any], trainable: Algorithm, batch: Batch
    ) -> None:
        """Other sequences lie in other processes; the trainer prices decisions from the same tensors."""
        if not isinstance(trainable, AdvantageEstimator):
            pytest.skip("it has no summarise and settle")
        taken = [batch.taken(index, trainable) for index in range(len(batch.lengths))]
        before = [_copies(each) for each in taken]
        first = estimates_of(make(), taken)
        if not all(all(map(torch.equal, was, _copies(each))) for was, each in zip(before, taken, strict=True)):
            fault("summarise or settle changed log-probs or values in place; work on a copy (no method that ends in _)")
        said = {each.place: [*map(float, make().summarise(each))] for each in taken}
        places = range(len(taken))
        for when, order in (
            ("by an instance that summarised nothing", places),
            ("in another order", places[::-1]),
            ("of the last sequence alone", places[-1:]),
        ):
            again = settled(make(), said, [taken[place] for place in order])
            if not all(map(_same_estimate, [first[place] for place in order], again)):
                fault(
                    f"estimates made {when} differ; keep no state, and tell of other sequences what is needed by the "
                    "numbers of summarise"
                )

    # -- what decisions cost ------------------------------------------------------------------------------------------

    def test_every_decision_gets_a_price(self, algorithm: Algorithm, batch: Batch) -> None:
        """Of a micro-batch, from nothing but what the algorithm asked for; metrics are numbers of decisions, too."""
        properties_of(algorithm)
        for name, values_N in price_all(algorithm, batch).loss.metrics.items():
            prices.expect_metric(name, values_N, len(batch.logprobs_N))

    def test_what_it_asks_for_is_used(self, trainable: Algorithm, batch: Batch) -> None:
        """Else stale samples go uncorrected, or a forward, the memory of entropies or a whole model is paid in vain."""
        if trainable.old_logprobs != "none" and "old_logprobs" not in self.ignores:
            prices.expect_old_logprobs_used(trainable, batch)
        if trainable.needs_entropy and "entropy" not in self.ignores:
            prices.expect_entropy_used(trainable, batch)
        gradient_N = gradient_of(price_all(trainable, batch))
        for role in consulted(trainable).keys() - self.ignores:
            other = attrs.evolve(batch, frozen_N={**batch.frozen_N, role: batch.frozen_N[role] + 0.2})
            if torch.equal(gradient_N, gradient_of(price_all(trainable, other))):
                fault(
                    f"consults names the {role}, but gradients are the same whatever it says; use "
                    f"decisions.frozen[{role!r}], or, if it is only to be reported, set ignores = "
                    f"frozenset({{{role!r}}}) in the test class"
                )

    def test_the_same_decisions_cost_the_same_each_time(
        self, make: Callable[..., Any], trainable: Algorithm, batch: Batch
    ) -> None:
        """In every replica, at different times, after a restart; the trainer reports from the same tensors after."""
        before = properties_of(trainable)
        first, used = price_all(trainable, batch), make()
        prices.expect_inputs_left(trainable, first, batch)
        for when, after in (("after a loss", properties_of(trainable)), ("in another instance", properties_of(make()))):
            changed = [name for name, value in before.items() if value != after[name]]
            if changed:
                fault(f"{', '.join(changed)} changed {when}; set them once, from options and context alone")
        price_all(used, attrs.evolve(batch, logprobs_N=batch.logprobs_N - 1.0))
        for when, again in (
            ("again", price_all(trainable, batch)),
            ("after others", price_all(used, batch)),
            ("by another instance", price_all(make(), batch)),
        ):
            if not prices.same_prices(first, again):
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
        prices.expect_direction(trainable, batch, self.on_policy_scale, is_rolled_out=is_rolled_out)
        if is_rolled_out and trainable.skips_zero_advantage:
            prices.expect_exactly_no_gradient(trainable, extreme(capabilities, advantages=(0.0,)))
        elif is_rolled_out and not self.has_other_terms:
            prices.expect_no_gradient_on_policy(trainable, batch)
        elif is_rolled_out and self.on_policy_scale is not None:
            prices.expect_terms_apart(trainable, batch)

    def test_prices_and_gradients_are_finite_however_far_off_policy(
        self, trainable: Algorithm, capabilities: AlgorithmCapabilities
    ) -> None:
        """One price, gradient or metric that is not finite and the whole step is lost."""
        batch = extreme(capabilities, advantages=_STRENGTHS[capabilities.source])
        prices.expect_finite(price_all(trainable, batch))

    def test_the_price_of_a_decision_depends_on_its_own_log_prob_only(self, trainable: Algorithm, batch: Batch) -> None:
        """Averages are the trainer's; with `couples_decisions`, a price may depend on all of its own sequence."""
        prices.expect_own_logprobs(price_all(trainable, batch), batch, couples=self.couples_decisions)

    def test_the_loss_equals_its_reference(self, trainable: Algorithm, capabilities: AlgorithmCapabilities) -> None:
        """Price and gradient are those of the formula that the author wrote down in float64, on and off-policy."""
        for drift in (0.0, 0.05, 0.5):
            part = price_all(trainable, draw(capabilities, drift=drift))
            decisions = prices.in_float64(trainable, part)
            expected_N = self.reference(decisions)
            if expected_N is None:
                pytest.skip("no reference: override reference(decisions) to compare with a formula")
            prices.expect_formula(part, decisions, expected_N)

    def test_a_step_does_not_depend_on_how_its_batch_lies(
        self, trainable: Algorithm, capabilities: AlgorithmCapabilities, batch: Batch
    ) -> None:
        """Micro-batches are a matter of memory, ranks come and go, packing orders; latents are cut, tokens never."""
        prices.expect_same_step(trainable, batch, is_cut="latents" in capabilities.payload_kinds)

    def test_demonstrations_become_likelier(
        self, make: Callable[..., Any], algorithm: Algorithm, capabilities: AlgorithmCapabilities
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
        _expect_imitation(algorithm, capabilities)


def _expect_imitation(algorithm: Algorithm, capabilities: AlgorithmCapabilities) -> None:
    """Fault prices of demonstrations that teach the wrong thing, overflow, or depend on how they lie."""
    shown, far = map(as_demonstrations, (draw(capabilities), extreme(capabilities, advantages=(1.0,))))
    whole, logprobs_N = price_demonstrations(algorithm, shown)
    (gradient_N,) = torch.autograd.grad(whole.loss_N.sum(), logprobs_N)
    if bool((gradient_N > 0).any()) or not bool((gradient_N < 0).any()):
        fault(
            f"the gradients of the prices of demonstrations by their log-probs are {gradient_N.tolist()[:6]}…; a "
            "demonstration that becomes likelier must not cost more, and some must cost less"
        )
    for name, values_N in whole.metrics.items():
        prices.expect_metric(name, values_N, len(shown.logprobs_N))
    loss, logprobs_N = price_demonstrations(algorithm, far)
    (gradient_N,) = torch.autograd.grad(loss.loss_N.sum(), logprobs_N)
    for what, values_N in (("price", loss.loss_N.detach()), ("gradient", gradient_N)):
        if (place := first_nonfinite(values_N)) is not None:
            fault(
                f"the {what} of a demonstration's decision is {values_N[place].item()} at a log-prob of "
                f"{logprobs_N[place].item():g}"
            )
    number = len(shown.lengths)
    shares = (range(number // 2), range(number // 2, number))
    parts = [price_demonstrations(algorithm, shown, members)[0].loss_N for members in shares]
    if not torch.allclose(torch.cat(parts), whole.loss_N, rtol=1e-5, atol=1e-6):
        fault(
            "prices of demonstrations change with what else is in the micro-batch; price each decision from its "
            "own sequence alone; averages are `aggregation`'s"
        )


def _same_estimate(first: Estimate, second: Estimate) -> bool:
    pairs = ((first.advantages_n, second.advantages_n), (first.targets_n, second.targets_n))
    alike = [one is two if one is None or two is None else torch.equal(one, two) for one, two in pairs]
    return all(alike) and first.metrics == second.metrics


def _copies(taken: Taken) -> list[torch.Tensor]:
    held = (taken.logprobs_n, *taken.frozen_n.values(), taken.values_n)
    return [each_n.clone() for each_n in held if each_n is not None]
