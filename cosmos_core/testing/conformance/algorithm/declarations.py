"""Tests of what an algorithm declares, and that the core refuses recipes that cannot give it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, get_args

import pytest

from cosmos_core.config.loading import recipe_from
from cosmos_core.protocols import (
    Algorithm,
    AlgorithmCapabilities,
    DatasetCapabilities,
    DecisionKind,
    EngineCapabilities,
    RewardCapabilities,
    Source,
)
from cosmos_core.testing.conformance.algorithm.batch import Batch
from cosmos_core.testing.conformance.algorithm.calls import consulted, properties_of
from cosmos_core.testing.conformance.algorithm.stepping import price_all
from cosmos_core.testing.conformance.algorithm.subject import AlgorithmSubject
from cosmos_core.testing.conformance.planning import planned
from cosmos_core.testing.conformance.plugin import fault
from cosmos_core.types import JSON

_SEMANTICS: Final = ("processed", "raw")


class AlgorithmDeclarations(AlgorithmSubject):
    """Whether an algorithm's declarations mean something, and are kept to."""

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
        """What is declared must leave a way to use it."""
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
        """What planning says of a recipe that gives all that is declared, but for the changes."""
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
