"""The kit for algorithms: what a test class sets and overrides, and the tests of what an algorithm declares."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final, get_args

import pytest

from cosmos_core.config.dynamic import DynamicKey, dynamic_keys
from cosmos_core.config.structure import structure
from cosmos_core.errors import ConfigError, CosmosError
from cosmos_core.protocols import (
    Algorithm,
    AlgorithmCapabilities,
    AlgorithmContext,
    Kind,
    Provider,
)
from cosmos_core.protocols.algorithm import Source
from cosmos_core.protocols.world import DecisionKind
from cosmos_core.testing.conformance.algorithm.batch import Batch, draw, extreme, priced
from cosmos_core.testing.conformance.algorithm.calls import admitted, advantages_of, consulted, plain, properties_of
from cosmos_core.testing.conformance.algorithm.groups import GroupTests
from cosmos_core.testing.conformance.algorithm.prices import PriceTests
from cosmos_core.testing.conformance.planning import planned
from cosmos_core.testing.conformance.plugin import Make, PluginConformance, fault
from cosmos_core.types import JSON, Group, Scalar

_SEMANTICS: Final = ("processed", "raw")
_NUMBERS: Final = (0.0, 1e-3, 0.01, 0.1, 0.25, 0.5, 0.9, 1.0, 1.5, 2.0, 3.0, 10.0, 100.0)
_FACTORS: Final = (0.01, 0.5, 2.0, 100.0)


class AlgorithmConformance(GroupTests, PriceTests, PluginConformance):
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
        batch: Fixture: the `Batch` that is priced, as `cosmos_core.testing.conformance.algorithm.batch.draw` makes it;
            by default six random sequences, slightly off-policy.
        groups: Fixture: the groups that `admit` is asked about, and that advantages are computed of if it admits
            them; by default ordinary, equal, extreme and unscored rewards.
        reference: Method `reference(decisions) -> tensor`: the price of each decision by the formula of the paper, in
            float64, with a gradient; by default None, and nothing is compared.
    """

    kind: ClassVar[Kind] = "algorithm"

    @pytest.fixture
    def context(self, capabilities: AlgorithmCapabilities) -> AlgorithmContext:
        """The context of a recipe that the algorithm can run in."""
        is_rolled_out = capabilities.source == "rollouts"
        size = max(4, capabilities.min_group_size) if is_rolled_out else 1 + (capabilities.source == "preferences")
        return AlgorithmContext(group_size=size, temperature=1.0, max_units=16, max_staleness=2 * is_rolled_out)

    @pytest.fixture
    def algorithm(self, make: Make) -> Algorithm:
        """An instance."""
        made: Algorithm = make()
        return made

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

    def test_declarations_mean_something(self, algorithm: Algorithm, capabilities: AlgorithmCapabilities) -> None:
        """`cosmos plan` and the trainer act on them without a second look, and some recipe must meet them."""
        if capabilities.source not in get_args(Source):
            fault(f"source is {capabilities.source!r}; it must be one of {', '.join(get_args(Source))}")
        smallest: object = capabilities.min_group_size
        if not isinstance(smallest, int) or smallest < 1:
            fault(f"min_group_size is {smallest!r}; it must be an integer of at least 1")
        if capabilities.source != "rollouts" and smallest > 1:
            fault(f"min_group_size is {smallest}, but {capabilities.source} are in no groups")
        for name, examples, is_closed in (
            ("payload_kinds", ("tokens",), False),
            ("logprob_semantics", _SEMANTICS, True),
            ("decisions", get_args(DecisionKind), True),
        ):
            declared: object = getattr(capabilities, name)
            if not isinstance(declared, frozenset) or not declared or (is_closed and not declared <= {*examples}):
                named = ", ".join(map(repr, examples))
                fault(f"{name} is {declared!r}; it must be a frozenset that names at least one, such as {named}")
        values = properties_of(algorithm)
        if capabilities.source != "rollouts" and values["old_logprobs"] == "behaviour":
            fault("old_logprobs is 'behaviour', but nobody generated a demonstration; use 'none' or 'recompute'")
        consulted(algorithm)
        if found := planned(self.plugin, capabilities):
            fault(f"no recipe can use the algorithm as it is declared: {'; '.join(found)}")

    def test_dynamic_options_become_what_they_allow_and_count(
        self, make: Make, dynamic: Sequence[DynamicKey], trainable: Algorithm, request: Any
    ) -> None:
        """A step that was begun before a change is ended with the options of its beginning, in its own instance."""
        batch, capabilities = (request.getfixturevalue(name) for name in ("batch", "capabilities"))
        batches = [batch, draw(capabilities, drift=0.5), extreme(capabilities, (1.0, -1.0))]
        groups = request.getfixturevalue("groups") if capabilities.source == "rollouts" else ()
        before = _seen(trainable, batches, groups)
        for key in dynamic:
            others, seen = _others(key), []
            for value in others:
                try:
                    made = make(**{key.key: value})
                except CosmosError as error:
                    fault(
                        f"the dynamic option {key.key} says that it may become {key.allowed}, but {value!r} is "
                        f"refused: {error}; say it with its validator, or declare it without dynamic=True"
                    )
                seen.append(_seen(made, batches, groups))
            if all(each == before for each in seen):
                fault(
                    f"the option {key.key} is dynamic, but prices, advantages, admissions and properties are the same "
                    f"with {key.value!r} and with {', '.join(map(repr, others))}; read it from the options that "
                    "Provider.create is given, or declare it without dynamic=True"
                )
            if _seen(trainable, batches, groups) != before:
                fault(
                    f"once an instance was made with another {key.key}, the one before goes by it, too; keep options "
                    "in the instance, neither in its class nor in its module"
                )


def _seen(algorithm: Algorithm, batches: Sequence[Batch], groups: Sequence[Group]) -> list[object]:
    """All that a trainer can see of an algorithm: prices, gradients, metrics, properties, admissions, advantages."""
    parts = [priced(algorithm, each) for each in batches]
    if algorithm.num_demonstrations:
        parts.append(priced(algorithm, batches[0], is_imitated=True))
    answers = [admitted(algorithm, group) for group in groups]
    kept = [group for group, answer in zip(groups, answers, strict=True) if answer is None]
    seen: list[object] = [properties_of(algorithm), answers, advantages_of(algorithm, kept) if kept else []]
    for part in parts:
        seen += [plain([part.loss]), part.gradient().tolist()]
    return seen


def _others(key: DynamicKey) -> list[Scalar]:
    """Values that an option may become, other than the one it has."""
    wanted: list[Scalar] = [True, False, "another", *key.choices, None]
    if isinstance(key.value, int | float):
        wanted += [key.value * factor for factor in _FACTORS]
    wanted += [*_NUMBERS, *(bound for bound in (key.at_least, key.at_most) if bound is not None)]
    wanted += [int(value) for value in wanted if type(value) is float]
    taken: dict[Scalar, None] = {}
    for value in wanted:
        with contextlib.suppress(ConfigError):
            taken[key.taken(value)] = None
    taken.pop(key.value, None)
    return list(taken)
