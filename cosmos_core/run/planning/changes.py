"""Changes of a run's recipe when it goes on: of its length, and of what neither weights nor samples depend on.

The layout of a policy replica is of the latter, to rounding: checkpoints go on in any. The file of a reward function
may be mended: the run then has a copy of the new one, and its manifest tells.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from cosmos_core.config.dynamic import CHANGEABLE, LAYOUT, TRAVEL, dynamic_keys, is_in
from cosmos_core.config.loading import recipe_from
from cosmos_core.config.overrides import apply_override
from cosmos_core.config.problems import show
from cosmos_core.config.schema import Recipe
from cosmos_core.config.sources import anywhere, copied, located, split
from cosmos_core.config.structure import unstructure
from cosmos_core.errors import ConfigError


@attrs.frozen(kw_only=True)
class Change:
    """A key that is not what it was."""

    key: str
    before: Any
    after: Any

    @property
    def is_mended(self) -> bool:
        """True if it is another version of a reward function's file."""
        if re.fullmatch(r"reward\.\d+\.plugin", self.key) is None:
            return False
        before, after = split(self.before), split(self.after)
        return before is not None and after is not None and before[1] == after[1]

    @property
    def is_to_be_checked(self) -> bool:
        """True if the recipe may not be able to run with it."""
        return self.is_mended or is_in(self.key, (*LAYOUT, *TRAVEL))

    def __str__(self) -> str:
        return f"{self.key} was {show(self.before)}, is {show(self.after)}"


def changed(recipe: Recipe, overrides: Sequence[str], directory: Path) -> tuple[Recipe, list[Change]]:
    """The recipe of a run in a folder with `--set KEY=VALUE` applied, and what differs."""
    data = unstructure(recipe)
    for override in overrides:
        apply_override(data, override)
    new = recipe_from(located(data, Path()))
    kept, _ = copied(unstructure(new), directory)
    differences = list(_differences(anywhere(unstructure(recipe)), anywhere(kept)))
    fixed = {change.key for change in differences if not (change.is_mended or is_in(change.key, CHANGEABLE))}
    if dynamic := sorted(fixed.intersection(each.key for each in dynamic_keys(Recipe, recipe, ""))):
        raise ConfigError(f"--set {', '.join(dynamic)}: resume without it, then `cosmos set {dynamic[0]}=VALUE`")
    if fixed:
        files = [(number, split(each.plugin)) for number, each in enumerate(recipe.reward)]
        same = [f"reward.{number}.plugin=FILE.py:{found[1]}" for number, found in files if found]
        raise ConfigError(
            f"--set {', '.join(sorted(fixed))}: a run that goes on keeps what its weights and samples come from; make "
            "another, from this one's model if you like (cosmos export RUN, then --set model.path=RUN/export). "
            f"--resume can change {', '.join(CHANGEABLE)}, and the file of a reward function, not its NAME "
            f"({', '.join(same) or 'reward.N.plugin'})"
        )
    return new, differences


def _differences(before: Any, after: Any, key: str = "") -> Iterator[Change]:
    tables = (before, after)
    if all(isinstance(each, list) and each and isinstance(each[0], Mapping) for each in tables):
        before, after = ({str(index): entry for index, entry in enumerate(each)} for each in tables)
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        for name in {**before, **after}:
            yield from _differences(before.get(name), after.get(name), f"{key}.{name}" if key else name)
    elif before != after:
        yield Change(key=key, before=before, after=after)
