"""Which version of each plugin of a recipe this process would use, from metadata alone."""

from __future__ import annotations

from collections.abc import Collection
from importlib.metadata import version

from cosmos_core.config.schema import Recipe
from cosmos_core.errors import PluginError
from cosmos_core.plugins.choice import choose
from cosmos_core.plugins.discovery import discover
from cosmos_core.plugins.roles import selections
from cosmos_core.protocols.versions import Kind


def plugin_versions(recipe: Recipe, kinds: Collection[Kind]) -> dict[str, str]:
    """Distribution and version of the plugins that a recipe names, and of the core, by `KIND NAME`.

    What is not installed here is left out: whoever needs it says so when it loads it.

    Args:
        recipe: The recipe.
        kinds: Of these kinds only.
    """
    records, found = discover(), {"cosmos-core": version("cosmos-core")}
    for kind, name in selections(recipe, kinds):
        try:
            record = choose(kind, name, records)
        except PluginError:
            continue
        found[f"{kind} {record.name}"] = f"{record.distribution} {record.version}"
    return found
