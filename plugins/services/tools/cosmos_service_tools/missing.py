"""Plugins that a recipe names and that are not installed here."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from cosmos_core.config.schema import Recipe
from cosmos_core.errors import PluginError, PluginNotFoundError
from cosmos_core.plugins.choice import choose
from cosmos_core.plugins.discovery import PluginRecord
from cosmos_core.plugins.known import KNOWN
from cosmos_core.plugins.recipe import selections


@attrs.frozen
class Missing:
    """Distributions to install; what is said of plugins that no known distribution provides, or that cannot be used."""

    distributions: tuple[str, ...]
    unknown: tuple[str, ...]

    @property
    def install(self) -> str:
        """The line that installs them all; empty if there are none."""
        return f"pip install {' '.join(self.distributions)}" if self.distributions else ""

    @property
    def words(self) -> str:
        """All of it, in words; empty if nothing is missing."""
        return "; ".join([*([self.install] if self.install else ()), *self.unknown])


def missing_from(recipe: Recipe, records: Sequence[PluginRecord]) -> Missing:
    """Look for the plugins of a recipe among the `records` of those that are installed."""
    distributions, unknown = [], []
    for kind, name in selections(recipe):
        try:
            record = choose(kind, name, records)
        except PluginNotFoundError as error:
            if (kind, name) in KNOWN:
                distributions.append(KNOWN[kind, name])
            else:
                unknown.append(str(error))
        except PluginError as error:
            unknown.append(str(error))
        else:
            if record.status in ("broken", "not installed"):
                unknown.append(f"{kind} plugin {name!r} of {record.distribution} is {record.status}: {record.problem}")
    return Missing(tuple(dict.fromkeys(distributions)), tuple(unknown))
