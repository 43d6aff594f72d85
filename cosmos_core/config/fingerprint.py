"""Compatibility fingerprint: what every process of a run has in common, keys of the recipe and versions of plugins.

A replica says it with its hello. One whose fingerprint differs would train, or generate, something else.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

from cosmos_core.config.schema import Recipe
from cosmos_core.config.sources import anywhere
from cosmos_core.config.structure import unstructure

PLUGIN: Final = "plugin "
"""Begins the names of plugins; a process says those that it uses."""

_OWN: Final = frozenset({"run.output_dir", "launch", "tracking", "control", "policy.replicas", "rollout.replicas"})
"""Keys and tables in which processes may differ: where they run, and how many they are."""


def facts_of(recipe: Recipe, plugins: Mapping[str, str]) -> dict[str, str]:
    """The fingerprint of a process: its recipe, and versions of its plugins by kind and name (`plugin.versions`)."""
    keys = {key: json.dumps(value, sort_keys=True) for key, value in _leaves(anywhere(unstructure(recipe)), "")}
    return keys | {f"{PLUGIN}{name}": version for name, version in plugins.items()}


def difference(ours: Mapping[str, str], theirs: Mapping[str, str]) -> str:
    """Tell the first difference, by name, with the value on each side; empty if there is none.

    A plugin that only one side uses is no difference: the recipe names them, and each process has those of its role.
    """
    names = sorted(
        name
        for name in {*ours, *theirs}
        if ours.get(name) != theirs.get(name)
        and not (name.startswith(PLUGIN) and not (name in ours and name in theirs))
    )
    if not names:
        return ""
    more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
    name = names[0]
    return f"its {name} is {theirs.get(name, 'absent')}, and {ours.get(name, 'absent')} in this run{more}"


def _leaves(data: Any, key: str) -> Iterator[tuple[str, Any]]:
    if key in _OWN:
        return
    # A list of tables, as of rewards, has keys with the number of each.
    is_tables = isinstance(data, list) and all(isinstance(each, Mapping) for each in data)
    if data and (is_tables or isinstance(data, Mapping)):
        for name, value in enumerate(data) if is_tables else data.items():
            yield from _leaves(value, f"{key}.{name}" if key else str(name))
    else:
        yield key, data
