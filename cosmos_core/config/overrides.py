"""Changes to a recipe from the command line: `--set a.b.c=VALUE`, and plugins selected by name.

They change the plain mapping before it is structured, so they are checked just like the file.
"""

from __future__ import annotations

import datetime as dt
import json
import tomllib
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any, Final

from cosmos_core.config.problems import show, suggestion
from cosmos_core.config.sources import absolute
from cosmos_core.errors import ConfigError

SELECTABLE: Final = ("model", "algorithm", "dataset", "reward", "environment")
_QUOTES: Final = ("'", '"', "[", "{")


def apply_override(data: MutableMapping[str, Any], override: str) -> None:
    """Apply one `a.b.c=VALUE` in place.

    The value is TOML; what is not TOML is a string (`--set algorithm.plugin=grpo`). A number indexes an
    array (`reward.0.weight=2`); tables on the way are made as needed. Unknown keys are left to structuring.
    """
    key, separator, text = override.partition("=")
    if not separator:
        raise ConfigError(f"--set {override}: expected KEY=VALUE, for example --set policy.replicas=2")
    path = _parse_key(key.strip(), override)
    _assign(data, path, parse_value(text.strip(), override), override)


def assign(data: MutableMapping[str, Any], key: str, value: Any) -> None:
    """Give `a.b.c` a value in place; of a mapping, each key is given its value, beside those that are there."""
    if isinstance(value, Mapping) and value:
        for name, each in value.items():
            assign(data, f"{key}.{json.dumps(str(name), ensure_ascii=False)}", each)
        return
    _assign(data, _parse_key(key, key), value, f"{key}={show(value)}")


def apply_selections(data: MutableMapping[str, Any], selections: Mapping[str, str | Sequence[str]]) -> None:
    """Select plugins by name in place.

    A plugin other than the recipe's takes the place of the recipe's choice, whose options were that other
    plugin's own; the same plugin keeps them. Rewards are separated by commas and take the place of all of
    the recipe's.
    """
    for kind, name in selections.items():
        if kind not in SELECTABLE:
            raise ConfigError(f"{kind}: cannot be selected by name; {suggestion(kind, SELECTABLE)}")
        listed = [name] if isinstance(name, str) else name
        # What is typed has commas between rewards.
        listed = name.split(",") if kind == "reward" and isinstance(name, str) else listed
        names = [absolute(part.strip(), Path()) for part in listed]
        if not all(names):
            raise ConfigError(f"--{kind}: expected the name of a plugin, got {show(name)}")
        if kind == "reward":
            data[kind] = [_selected(_entry_of(data.get(kind), reward), reward) for reward in names]
        else:
            data[kind] = _selected(data.get(kind), names[0])


def _entry_of(entries: Any, plugin: str) -> Any:
    """The recipe's entry of a reward, if it has one."""
    listed = entries if isinstance(entries, list) else []
    return next((entry for entry in listed if isinstance(entry, Mapping) and entry.get("plugin") == plugin), None)


def _selected(table: Any, plugin: str) -> dict[str, Any]:
    kept = dict(table) if isinstance(table, Mapping) else {}
    if kept.get("plugin", plugin) != plugin:
        kept.pop("options", None)
    return {**kept, "plugin": plugin}


def _parse_key(key: str, override: str) -> list[str]:
    """The parts of a TOML key, so that a part with a dot may be quoted."""
    try:
        table: Any = tomllib.loads(f"{key} = 0")
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"--set {override}: {key!r} is no key, such as policy.optimizer.lr ({error})") from None
    path = []
    while isinstance(table, dict):
        ((part, table),) = table.items()
        path.append(part)
    return path


def parse_value(text: str, override: str) -> Any:
    """The value of `KEY=VALUE` (`override`, for messages): TOML, or a string where it does not begin as TOML does."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError) as error:  # besides what is no TOML: too many digits, too deep
        if text.startswith(_QUOTES):
            raise ConfigError(f"--set {override}: the value is not valid TOML: {error}") from None
        return text
    value = parsed["value"]
    # A recipe has no dates: what looks like one is a name.
    is_text = len(parsed) > 1 or isinstance(value, dt.date | dt.time)
    return text if is_text else value


def _assign(container: Any, path: list[str], value: Any, override: str) -> None:
    for depth, part in enumerate(path[:-1]):
        where = ".".join(path[: depth + 1])
        key = _key_in(container, part, where, override)
        if isinstance(container, MutableMapping) and key not in container:
            if path[depth + 1].isdecimal():
                raise ConfigError(f"--set {override}: {where} has no entries; give it as a whole, {where}=[…]")
            container[key] = {}
        container = container[key]
        if not isinstance(container, MutableMapping | list):
            raise ConfigError(f"--set {override}: {where} is {show(container)}, which has no key {path[depth + 1]!r}")
    container[_key_in(container, path[-1], ".".join(path), override)] = value


def _key_in(container: Any, part: str, where: str, override: str) -> str | int:
    """The part of a path as a key or an index of its container."""
    if not isinstance(container, list):
        return part
    if not part.isdecimal() or int(part) >= len(container):
        last = len(container) - 1
        allowed = f"expected an index from 0 to {last}" if container else "the array is empty"
        raise ConfigError(f"--set {override}: {where} does not exist; {allowed}")
    return int(part)
