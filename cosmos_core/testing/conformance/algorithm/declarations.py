"""Checks of what an algorithm declares: capabilities, the recipes that they allow, and options that may change."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias, get_args

import torch

from cosmos_core.config.dynamic import DynamicKey
from cosmos_core.config.loading import recipe_from
from cosmos_core.errors import ConfigError, CosmosError
from cosmos_core.protocols import (
    Algorithm,
    AlgorithmCapabilities,
    DatasetCapabilities,
    EngineCapabilities,
    RewardCapabilities,
)
from cosmos_core.protocols.algorithm import Source
from cosmos_core.protocols.world import DecisionKind
from cosmos_core.testing.conformance.algorithm.calls import Batch, admitted, advantages_of, properties_of
from cosmos_core.testing.conformance.algorithm.step import (
    as_demonstrations,
    gradient_of,
    price_all,
    price_demonstrations,
)
from cosmos_core.testing.conformance.planning import planned
from cosmos_core.testing.conformance.plugin import fault
from cosmos_core.types import JSON, Group, Scalar

_SEMANTICS: Final = ("processed", "raw")


def expect_capabilities(capabilities: AlgorithmCapabilities) -> None:
    """Fault capabilities that mean nothing."""
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


def expect_planning(plugin: str, capabilities: AlgorithmCapabilities) -> None:
    """Fault a declaration that no recipe can meet, or that `cosmos plan` does not hold recipes to."""
    usable, kinds = min(capabilities.logprob_semantics, default="processed"), capabilities.payload_kinds
    found = _problems(plugin, capabilities)
    if found:
        fault(f"no recipe can use the algorithm as it is declared: {'; '.join(found)}")
    refused: list[tuple[str, str, dict[str, Any]]] = []
    if capabilities.min_group_size > 1:
        fewer = capabilities.min_group_size - 1
        refused.append(("rollout.group_size", f"group_size = {fewer}", {"group_size": fewer}))
    if capabilities.source != "rollouts":
        refused.append(("demonstrations", "a dataset without demonstrations", {"demonstrations": False}))
    else:
        for other in {*_SEMANTICS} - capabilities.logprob_semantics:
            engine = EngineCapabilities(logprob_semantics=other, payload_kinds=kinds)
            refused.append(("rollout.engine.plugin", f"an engine with {other} ones", {"engine": engine}))
        engine = EngineCapabilities(logprob_semantics=usable, payload_kinds=frozenset({"undeclared"}))
        refused.append(("algorithm", "an engine that makes other payloads", {"engine": engine}))
        if capabilities.needs_rewards:
            refused.append(("reward", "a recipe without rewards", {"reward": []}))
    for key, what, changes in refused:
        found = _problems(plugin, capabilities, **changes)
        if not any(key in problem for problem in found):
            fault(f"cosmos plan accepts {what}, which the algorithm does not declare; it said: {found or 'nothing'}")


def _problems(
    plugin: str,
    capabilities: AlgorithmCapabilities,
    *,
    group_size: int = 0,
    engine: EngineCapabilities | None = None,
    demonstrations: bool = True,
    **changes: Any,
) -> list[str]:
    """Problems that planning finds in a recipe that gives all that is declared, but for the changes."""
    size = group_size or max(2, capabilities.min_group_size)
    # Any temperature but 1: at 1 every sort of log-probs is the same.
    recipe: Mapping[str, JSON] = {
        "run": {"name": "kit", "steps": 1},
        "model": {"plugin": "hf", "config": {}},
        "algorithm": {"plugin": plugin},
        "dataset": {"plugin": "any"},
        "reward": [{"plugin": "any"}],
        "rollout": {"group_size": size, "sampling": {"max_units": 16, "temperature": 0.7}},
    }
    usable = min(capabilities.logprob_semantics, default="processed")
    engine = engine or EngineCapabilities(logprob_semantics=usable, payload_kinds=capabilities.payload_kinds)
    return planned(
        recipe_from({**recipe, **changes}),
        algorithm=capabilities,
        reward=RewardCapabilities(payload_kinds=engine.payload_kinds),
        engine=engine,
        dataset=DatasetCapabilities(demonstrations=demonstrations),
    )


Seen: TypeAlias = tuple[list[torch.Tensor], list[object]]
"""All that a trainer can see of an algorithm: prices, gradients and metrics; properties, admissions, advantages."""

_NUMBERS: Final = (0.0, 1e-3, 0.01, 0.1, 0.25, 0.5, 0.9, 1.0, 1.5, 2.0, 3.0, 10.0, 100.0)
_FACTORS: Final = (0.01, 0.5, 2.0, 100.0)


def expect_dynamic(
    make: Callable[..., Algorithm], keys: Sequence[DynamicKey], batches: Sequence[Batch], groups: Sequence[Group]
) -> None:
    """Fault dynamic options that cannot become what they allow, change nothing, or change other instances."""
    first = make()
    before = _seen(first, batches, groups)
    for key in keys:
        made = list(_made_with(make, key))
        seen = [_seen(other, batches, groups) for other in made]
        if all(_same(before, each) for each in seen):
            tried = ", ".join(map(repr, _others(key)))
            fault(
                f"the option {key.key} is dynamic, but prices, advantages, admissions and properties are the same "
                f"with {key.value!r} and with {tried}; read it from the options that Provider.create is given, or "
                "declare it without dynamic=True"
            )
        if not _same(before, _seen(first, batches, groups)):
            fault(
                f"once an instance was made with another {key.key}, the one before goes by it, too; keep options "
                "in the instance, neither in its class nor in its module"
            )


def _made_with(make: Callable[..., Algorithm], key: DynamicKey) -> Iterator[Algorithm]:
    """Instances with other values of an option, none of which may be refused."""
    for value in _others(key):
        try:
            yield make(**{key.key: value})
        except CosmosError as error:
            fault(
                f"the dynamic option {key.key} says that it may become {key.allowed}, but {value!r} is refused:"
                f" {error}; say it with its validator, or declare it without dynamic=True"
            )


def _seen(algorithm: Algorithm, batches: Sequence[Batch], groups: Sequence[Group]) -> Seen:
    seen: list[torch.Tensor] = []
    for part in (price_all(algorithm, each) for each in batches):
        metrics = [values_N for _, values_N in sorted(part.loss.metrics.items())]
        seen += [part.loss.loss_N.detach(), gradient_of(part), *metrics]
    if algorithm.num_demonstrations:
        loss, _ = price_demonstrations(algorithm, as_demonstrations(batches[0]))
        seen.append(loss.loss_N.detach())
    answers = [admitted(algorithm, group) for group in groups]
    kept = [group for group, answer in zip(groups, answers, strict=True) if answer is None]
    return seen, [properties_of(algorithm), answers, advantages_of(algorithm, kept) if kept else []]


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


def _same(first: Seen, second: Seen) -> bool:
    (seen, said), (others_seen, others_said) = first, second
    is_alike = len(seen) == len(others_seen) and all(map(torch.equal, seen, others_seen))
    return is_alike and said == others_said
