"""Tests of options that declare themselves dynamic: `cosmos set` changes them between two steps of a run.

A run makes a new instance with the changed options, and may use the old one still for what was begun before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

import pytest
import torch

from cosmos_core.config.dynamic import DynamicKey, dynamic_keys
from cosmos_core.config.structure import structure
from cosmos_core.errors import ConfigError, CosmosError
from cosmos_core.protocols import Algorithm, AlgorithmCapabilities, Imitating, Provider
from cosmos_core.testing.conformance.algorithm.batch import Batch, draw, extreme
from cosmos_core.testing.conformance.algorithm.calls import admitted, advantages_of, properties_of
from cosmos_core.testing.conformance.algorithm.imitating import as_demonstrations, price_demonstrations
from cosmos_core.testing.conformance.algorithm.stepping import gradient_of, price_all
from cosmos_core.testing.conformance.algorithm.subject import AlgorithmSubject
from cosmos_core.testing.conformance.plugin import fault
from cosmos_core.types import JSON, Group, Scalar

Doings: TypeAlias = tuple[list[torch.Tensor], list[object]]
"""All that a trainer can see of an algorithm: prices, gradients and metrics; properties, admissions, advantages."""

_NUMBERS: Final = (0.0, 1e-3, 0.01, 0.1, 0.25, 0.5, 0.9, 1.0, 1.5, 2.0, 3.0, 10.0, 100.0)
_FACTORS: Final = (0.01, 0.5, 2.0, 100.0)


class AlgorithmChanging(AlgorithmSubject):
    """Whether dynamic options can become what they allow, and then count."""

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
        """What was read once for all instances, or by the first of them, does not change."""
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
        """What was begun before a change is ended with the options of its beginning."""
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
