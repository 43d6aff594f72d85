"""Changes of a run's recipe when it goes on: of its length, and of what neither weights nor samples depend on.

The layout of a policy replica is of the latter, to rounding: checkpoints go on in any.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs

from cosmos_core.config.dynamic import CHANGEABLE, LAYOUT, TRAVEL, dynamic_keys, is_in
from cosmos_core.config.loading import recipe_from
from cosmos_core.config.overrides import apply_override
from cosmos_core.config.problems import show
from cosmos_core.config.schema import Recipe
from cosmos_core.config.structure import unstructure
from cosmos_core.errors import ConfigError


@attrs.frozen(kw_only=True)
class Change:
    """A key that is not what it was."""

    key: str
    before: Any
    after: Any

    @property
    def is_to_be_checked(self) -> bool:
        """True if the recipe may not be able to run with it."""
        return is_in(self.key, (*LAYOUT, *TRAVEL))

    def __str__(self) -> str:
        return f"{self.key} was {show(self.before)}, is {show(self.after)}"


def changed(recipe: Recipe, overrides: Sequence[str]) -> tuple[Recipe, list[Change]]:
    """A run's recipe with `--set KEY=VALUE` applied, and what differs."""
    data = unstructure(recipe)
    for override in overrides:
        apply_override(data, override)
    new = recipe_from(data)
    differences = list(_differences(unstructure(recipe), unstructure(new)))
    fixed = [change.key for change in differences if not is_in(change.key, CHANGEABLE)]
    if fixed:
        raise ConfigError(
            f"--set {', '.join(fixed)}: a run that goes on keeps what its weights and samples come from; --resume can "
            f"change {', '.join(CHANGEABLE)}. {_hint(recipe, fixed)}For the rest make another run, from this one's "
            "model if you like: cosmos export RUN, then --set model.path=RUN/export"
        )
    return new, differences


def _hint(recipe: Recipe, fixed: Sequence[str]) -> str:
    """The keys among these that can change once the run goes on, as the end of a remedy."""
    dynamic = {each.key for each in dynamic_keys(Recipe, recipe, "")}.intersection(fixed)
    return f"{', '.join(sorted(dynamic))}: resume, then `cosmos set`. " if dynamic else ""


def _differences(before: Any, after: Any, key: str = "") -> Iterator[Change]:
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        for name in {**before, **after}:
            yield from _differences(before.get(name), after.get(name), f"{key}.{name}" if key else name)
    elif before != after:
        yield Change(key=key, before=before, after=after)
