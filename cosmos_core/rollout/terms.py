"""What leases go by: the recipe, with the values of dynamic keys that each of them carries."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import attrs

from cosmos_core.config.loading import recipe_with
from cosmos_core.config.schema import Recipe
from cosmos_core.protocols import Algorithm
from cosmos_core.types import Scalar

_KEPT: Final = 16


@attrs.frozen(kw_only=True, eq=False)
class Terms:
    """What one lease goes by, from its beginning to its end."""

    recipe: Recipe
    algorithm: Algorithm


class LeaseTerms:
    """Terms by the values that leases carry; those of the newest values are kept.

    Called by several threads; whoever comes second makes the same once more.

    Args:
        recipe: As it was at first.
        make: Makes the main stage's algorithm as a recipe has it.
    """

    def __init__(self, recipe: Recipe, make: Callable[[Recipe], Algorithm]) -> None:
        self._recipe: Final = recipe
        self._make: Final = make
        self._first: Final = Terms(recipe=recipe, algorithm=make(recipe))
        self._known: dict[tuple[tuple[str, Scalar], ...], Terms] = {}

    def of(self, settings: Mapping[str, Scalar]) -> Terms:
        """What a lease with these values goes by.

        Raises:
            ConfigError: The algorithm refuses its options, or the recipe its values.
            PluginError: The algorithm failed.
        """
        if not settings:
            return self._first
        key = tuple(sorted(settings.items()))
        known = self._known.get(key)
        if known is None:
            recipe = recipe_with(self._recipe, settings)
            known = Terms(recipe=recipe, algorithm=self._make(recipe))
            self._known = dict([*list(self._known.items())[1 - _KEPT :], (key, known)])
        return known
