"""The resolved recipe as TOML, defaults included."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tomli_w

from cosmos_core.config.schema import Recipe
from cosmos_core.config.structure import unstructure


def dump_recipe(recipe: Recipe) -> str:
    """TOML that loads to an equal recipe. TOML has no null: keys without a value are left out."""
    return tomli_w.dumps(_without_none(unstructure(recipe)))


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return [_without_none(item) for item in value] if isinstance(value, list) else value
