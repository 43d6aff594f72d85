"""The kit for algorithms, with the tests of what one declares and of recipes that cannot give it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias, get_args

import attrs
import pytest
import torch

from cosmos_core.config.dynamic import DynamicKey, dynamic_keys
from cosmos_core.config.loading import recipe_from
from cosmos_core.config.structure import structure
from cosmos_core.errors import ConfigError, CosmosError
from cosmos_core.policy.training.microbatch import know
from cosmos_core.protocols import (
    Algorithm,
    AlgorithmCapabilities,
    DatasetCapabilities,
    Decided,
    EngineCapabilities,
    Loss,
    Provider,
    RewardCapabilities,
)
from cosmos_core.protocols.algorithm import Imitating, Source
from cosmos_core.protocols.world import DecisionKind
from cosmos_core.testing.conformance.algorithm.advantages import (
    AlgorithmAdmission,
    AlgorithmAdvantages,
    AlgorithmEstimating,
)
from cosmos_core.testing.conformance.algorithm.calls import (
    Batch,
    admitted,
    advantages_of,
    calling,
    consulted,
    draw,
    extreme,
    priced_imitation,
    properties_of,
)
from cosmos_core.testing.conformance.algorithm.loss import (
    AlgorithmGradients,
    AlgorithmPricing,
    AlgorithmSplits,
    expect_metric,
)
from cosmos_core.testing.conformance.algorithm.subject import AlgorithmSubject
from cosmos_core.testing.conformance.algorithm.world import first_nonfinite, gradient_of, pieced, price_all
from cosmos_core.testing.conformance.algorithm.world import micro_batch_of as packed
from cosmos_core.testing.conformance.planning import planned
from cosmos_core.testing.conformance.plugin import fault
from cosmos_core.types import JSON, Group, Scalar

_SEMANTICS: Final = ("processed", "raw")


class AlgorithmDeclarations(AlgorithmSubject):
    """An algorithm's declarations mean something, and are kept to."""

    def test_capabilities_mean_something(self, capabilities: AlgorithmCapabilities) -> None:
        """`cosmos plan` relies on them."""
        if capabilities.source not in get_args(Source):
            fault(f"source is {capabilities.source!r}; it must be one of {', '.join(get_args(Source))}")
        smallest: object = capabilities.min_group_size
        if not isinstance(smallest, int) or smallest < 1:
            fault(f"min_group_size is {smallest!r}; it must be an integer of at least 1")
        if capabilities.source != "rollouts" and capabilities.min_group_size > 1:
            fault(f"min_group_size is {capabilities.min_group_size}, but {capabilities.source} are in no groups")
        for name, known in (("payload_kinds", None), ("logprob_semantics", frozenset(_SEMANTICS))):
            declared: object = getattr(capabilities, name)
            if not isinstance(declared, frozenset) or not declared or (known is not None and not declared <= known):
                example = ", ".join(map(repr, _SEMANTICS)) if known else "'tokens'"
                fault(f"{name} is {declared!r}; it must be a frozenset that names at least one, such as {example}")
        if not capabilities.decisions:
            fault(f"decisions is frozenset(); it must name at least one of {', '.join(get_args(DecisionKind))}")

    def test_properties_have_values_that_the_trainer_knows(
        self, algorithm: Algorithm, capabilities: AlgorithmCapabilities
    ) -> None:
        """The trainer acts on them without a second look."""
        values = properties_of(algorithm)
        if capabilities.source != "rollouts" and values["old_logprobs"] == "behaviour":
            fault("old_logprobs is 'behaviour', but nobody generated a demonstration; use 'none' or 'recompute'")
        consulted(algorithm)

    def test_summarise_and_settle_come_together(self, algorithm: Algorithm) -> None:
        """With one of them alone it would be taken for an algorithm that estimates nothing."""
        has = [name for name in ("summarise", "settle") if callable(getattr(algorithm, name, None))]
        if len(has) == 1:
            fault(f"it has {has[0]} and not the other of summarise and settle; give both (`Estimating`) or neither")

    def test_properties_do_not_change(self, make: Callable[..., Any], trainable: Algorithm, batch: Batch) -> None:
        """Every replica reads them for itself, at different times."""
        before = properties_of(trainable)
        price_all(trainable, batch)
        for when, after in (("after a loss", properties_of(trainable)), ("in another instance", properties_of(make()))):
            changed = [name for name, value in before.items() if value != after[name]]
            if changed:
                fault(f"{', '.join(changed)} changed {when}; set them once, from options and context alone")

    def test_a_recipe_that_gives_what_is_declared_is_accepted(self, capabilities: AlgorithmCapabilities) -> None:
        """A declaration must leave a way to use it."""
        found = self._problems(capabilities)
        if found:
            fault(f"no recipe can use the algorithm as it is declared: {'; '.join(found)}")

    def test_fewer_samples_of_a_prompt_than_declared_are_refused(self, capabilities: AlgorithmCapabilities) -> None:
        """Its estimator would have nothing to compare."""
        if capabilities.min_group_size <= 1:
            pytest.skip("not declared: min_group_size is 1")
        found = self._problems(capabilities, group_size=capabilities.min_group_size - 1)
        _expect("rollout.group_size", found, f"group_size = {capabilities.min_group_size - 1}")

    def test_log_prob_semantics_that_are_not_declared_are_refused(self, capabilities: AlgorithmCapabilities) -> None:
        """Ratios between different sorts of log-probs are wrong."""
        others = [each for each in _SEMANTICS if each not in capabilities.logprob_semantics]
        if capabilities.source != "rollouts" or not others:
            pytest.skip("it can use every sort of log-probs")
        engine = EngineCapabilities(logprob_semantics=others[0], payload_kinds=capabilities.payload_kinds)
        _expect(
            "rollout.engine.plugin", self._problems(capabilities, engine=engine), f"an engine with {others[0]} ones"
        )

    def test_payloads_that_are_not_declared_are_refused(self, capabilities: AlgorithmCapabilities) -> None:
        """It could not price them."""
        if capabilities.source != "rollouts":
            pytest.skip(f"{capabilities.source} come from no engine")
        engine = EngineCapabilities(logprob_semantics=_usable(capabilities), payload_kinds=frozenset({"undeclared"}))
        _expect("algorithm", self._problems(capabilities, engine=engine), "an engine that makes other payloads")

    def test_a_source_that_is_not_declared_is_refused(self, capabilities: AlgorithmCapabilities) -> None:
        """It learns from rollouts with rewards, or from rows with demonstrations."""
        if capabilities.source != "rollouts":
            found = self._problems(capabilities, dataset=DatasetCapabilities())
            _expect("demonstrations", found, "a dataset without demonstrations")
        elif capabilities.needs_rewards:
            _expect("reward", self._problems(capabilities, reward=[]), "a recipe without rewards")

    def _problems(
        self,
        capabilities: AlgorithmCapabilities,
        *,
        group_size: int | None = None,
        engine: EngineCapabilities | None = None,
        **changes: Any,
    ) -> list[str]:
        """Problems that planning finds in a recipe that gives all that is declared, but for the changes."""
        dataset = changes.pop("dataset", DatasetCapabilities(demonstrations=True))
        size = group_size or max(2, capabilities.min_group_size)
        recipe = recipe_from({**_recipe(self.plugin, size), **changes})
        kinds = capabilities.payload_kinds
        engine = engine or EngineCapabilities(logprob_semantics=_usable(capabilities), payload_kinds=kinds)
        return planned(
            recipe,
            algorithm=capabilities,
            reward=RewardCapabilities(payload_kinds=engine.payload_kinds),
            engine=engine,
            dataset=dataset,
        )


def _recipe(plugin: str, group_size: int) -> Mapping[str, JSON]:
    # Any temperature but 1: at 1 every sort of log-probs is the same.
    return {
        "run": {"name": "kit", "steps": 1},
        "model": {"plugin": "hf", "config": {}},
        "algorithm": {"plugin": plugin},
        "dataset": {"plugin": "any"},
        "reward": [{"plugin": "any"}],
        "rollout": {"group_size": group_size, "sampling": {"max_units": 16, "temperature": 0.7}},
    }


def _usable(capabilities: AlgorithmCapabilities) -> str:
    return min(capabilities.logprob_semantics, default="processed")


def _expect(key: str, found: list[str], what: str) -> None:
    if not any(key in problem for problem in found):
        fault(f"cosmos plan accepts {what}, which the algorithm does not declare; it said: {found or 'nothing'}")


_CPU = torch.device("cpu")


class AlgorithmImitating(AlgorithmSubject):
    """Demonstrations become likelier, however they lie."""

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
        """Log-probs alone are given: nothing was generated, and no frozen model is asked."""
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


Doings: TypeAlias = tuple[list[torch.Tensor], list[object]]
"""All that a trainer can see of an algorithm: prices, gradients and metrics; properties, admissions, advantages."""

_NUMBERS: Final = (0.0, 1e-3, 0.01, 0.1, 0.25, 0.5, 0.9, 1.0, 1.5, 2.0, 3.0, 10.0, 100.0)
_FACTORS: Final = (0.01, 0.5, 2.0, 100.0)


class AlgorithmChanging(AlgorithmSubject):
    """Dynamic options can become what they allow, and then count."""

    @pytest.fixture
    def dynamic(self, provider: Provider[Any], options: Mapping[str, JSON]) -> Sequence[DynamicKey]:
        """The options that may change while a run goes on."""
        try:
            given: object = structure(options, provider.options, "")
            found = dynamic_keys(provider.options, given, "")
        except ConfigError as error:
            pytest.skip(f"the options are refused: {error}")
        except TypeError as error:
            fault(str(error))
        if not found:
            pytest.skip("no option is dynamic")
        return found

    @pytest.fixture
    def doings(
        self, capabilities: AlgorithmCapabilities, batch: Batch, request: pytest.FixtureRequest
    ) -> Callable[[Algorithm], Doings]:
        """Looks at all that an instance does."""
        batches = [batch, draw(capabilities, drift=0.5), extreme(capabilities, advantages=(1.0, -1.0))]
        is_asked = capabilities.source == "rollouts"
        groups: Sequence[Group] = request.getfixturevalue("groups") if is_asked else ()

        def look(algorithm: Algorithm) -> Doings:
            seen: list[torch.Tensor] = []
            for part in (price_all(algorithm, each) for each in batches):
                metrics = [values_N for _, values_N in sorted(part.loss.metrics.items())]
                seen += [part.loss.loss_N.detach(), gradient_of(part), *metrics]
            if isinstance(algorithm, Imitating) and algorithm.num_demonstrations:
                loss, _ = price_demonstrations(algorithm, as_demonstrations(batch))
                seen.append(loss.loss_N.detach())
            answers = [admitted(algorithm, group) for group in groups]
            kept = [group for group, answer in zip(groups, answers, strict=True) if answer is None]
            return seen, [properties_of(algorithm), answers, advantages_of(algorithm, kept) if kept else []]

        return look

    def test_a_dynamic_option_can_become_all_that_it_allows(
        self, make: Callable[..., Any], dynamic: Sequence[DynamicKey]
    ) -> None:
        """Whoever checks a change in a run that goes on knows its bounds, and nothing of other options."""
        for key in dynamic:
            for value in _others(key):
                try:
                    make(**{key.key: value})
                except CosmosError as error:
                    fault(
                        f"the dynamic option {key.key} says that it may become {key.allowed}, but {value!r} is refused:"
                        f" {error}; say it with its validator, or declare it without dynamic=True"
                    )

    def test_a_dynamic_option_takes_effect(
        self, make: Callable[..., Any], dynamic: Sequence[DynamicKey], doings: Callable[[Algorithm], Doings]
    ) -> None:
        """An option that was read once for all instances, or by the first of them, does not change."""
        before = doings(make())
        for key in dynamic:
            if all(_same(before, doings(other)) for other in _made_with(make, key)):
                tried = ", ".join(map(repr, _others(key)))
                fault(
                    f"the option {key.key} is dynamic, but prices, advantages, admissions and properties are the same "
                    f"with {key.value!r} and with {tried}; read it from the options that Provider.create is given, or "
                    "declare it without dynamic=True"
                )

    def test_an_instance_goes_by_its_own_options(
        self, make: Callable[..., Any], dynamic: Sequence[DynamicKey], doings: Callable[[Algorithm], Doings]
    ) -> None:
        """A step that was begun before a change is ended with the options of its beginning."""
        first = make()
        before = doings(first)
        for key in dynamic:
            for other in _made_with(make, key):
                doings(other)
            if not _same(before, doings(first)):
                fault(
                    f"once an instance was made with another {key.key}, the one before goes by it, too; keep options "
                    "in the instance, neither in its class nor in its module"
                )


def _made_with(make: Callable[..., Any], key: DynamicKey) -> Iterator[Algorithm]:
    """Instances with other values of an option; those that are refused are told of by another test."""
    for value in _others(key):
        with contextlib.suppress(CosmosError):
            yield make(**{key.key: value})


def _others(key: DynamicKey) -> list[Scalar]:
    """Values that an option may become, other than the one it has."""
    wanted: list[Scalar] = [True, False, *key.choices, *(None for _ in range(key.optional))]
    if isinstance(key.value, int | float):
        wanted += [key.value * factor for factor in _FACTORS]
    wanted += [*_NUMBERS, *(bound for bound in (key.at_least, key.at_most) if bound is not None)]
    if key.type == "integer":
        wanted += [int(value) for value in wanted if type(value) is float]
    if key.type == "text" and not key.choices:
        wanted.append("another")
    taken: dict[Scalar, None] = {}
    for value in wanted:
        with contextlib.suppress(ConfigError):
            taken[key.taken(value)] = None
    taken.pop(key.value, None)
    return list(taken)


def _same(first: Doings, second: Doings) -> bool:
    (seen, said), (others_seen, others_said) = first, second
    is_alike = len(seen) == len(others_seen) and all(map(torch.equal, seen, others_seen))
    return is_alike and said == others_said


class AlgorithmConformance(
    AlgorithmDeclarations,
    AlgorithmAdmission,
    AlgorithmAdvantages,
    AlgorithmEstimating,
    AlgorithmPricing,
    AlgorithmImitating,
    AlgorithmGradients,
    AlgorithmSplits,
    AlgorithmChanging,
):
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
