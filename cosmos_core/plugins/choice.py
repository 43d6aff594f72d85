"""Chooses the installed plugin that a name in a recipe means, without importing it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from packaging.utils import canonicalize_name

from cosmos_core.config.problems import nearest
from cosmos_core.errors import (
    ConfigError,
    PluginBrokenError,
    PluginConflictError,
    PluginError,
    PluginIncompatibleError,
    PluginNotFoundError,
)
from cosmos_core.plugins.discovery import DISABLE_VARIABLE, PluginRecord, autoload_disabled
from cosmos_core.plugins.functions import function_record
from cosmos_core.plugins.known import KNOWN
from cosmos_core.protocols import KINDS, Kind

_REFUSED: Final[Mapping[str, type[PluginError]]] = {
    "incompatible": PluginIncompatibleError,
    "invalid": PluginBrokenError,
}


def choose_all(
    selections: Iterable[tuple[Kind, str]],
    records: Sequence[PluginRecord],
    keys: Mapping[tuple[Kind, str], str] = MappingProxyType({}),
) -> dict[tuple[Kind, str], PluginRecord]:
    """The plugins of several selections, by these; raises as `choose` does, once all that are not found are known.

    `keys` of the recipe that name them are told with these.
    """
    chosen: dict[tuple[Kind, str], PluginRecord] = {}
    missing: dict[tuple[Kind, str], str] = {}
    for kind, selection in dict.fromkeys(selections):
        try:
            chosen[kind, selection] = choose(kind, selection, records)
        except PluginNotFoundError as error:
            key = keys.get((kind, selection))
            missing[kind, selection] = f"{key}: {error}" if key else str(error)
    if missing:
        named = sorted({KNOWN[key] for key in missing if key in KNOWN})
        line = [f"those of cosmos-core: pip install {' '.join(named)}"] if len(named) > 1 else []
        raise PluginNotFoundError("\n".join([*missing.values(), *line]))
    return chosen


def choose(kind: Kind, selection: str, records: Sequence[PluginRecord]) -> PluginRecord:
    """The plugin that `find` finds, if it can be used.

    Raises:
        PluginIncompatibleError: It was made for another release of the core.
        PluginBrokenError: Its entry point breaks a rule of the core.
    """
    record = find(kind, selection, records)
    if record.status in _REFUSED:
        raise _REFUSED[record.status](
            f"{kind} plugin {record.name!r} of {record.distribution} {record.version} cannot be used: {record.problem}"
        )
    return record


def find(kind: Kind, selection: str, records: Sequence[PluginRecord]) -> PluginRecord:
    """The plugin that a selection means, whatever is wrong with it.

    Args:
        kind: What is wanted.
        selection: A plugin's name, `distribution:name`, or `PATH.py:NAME` of a function or a class in a file.
        records: What is installed.

    Raises:
        PluginNotFoundError: Nothing installed has that name, or there is no such file.
        PluginConflictError: Several distributions provide it, and the selection does not say which.
    """
    if (function := function_record(kind, selection)) is not None:
        return function
    candidates = _selectable([record for record in records if record.kind == kind and _is_meant(selection, record)])
    if not candidates:
        raise PluginNotFoundError(_not_found(kind, selection, records))
    if len(candidates) > 1:
        name = candidates[0].name
        providers = " and by ".join(f"{record.distribution} {record.version}" for record in candidates)
        raise PluginConflictError(
            f"{kind} plugin {name!r} is provided by {providers}; "
            f"write which one, for example {candidates[0].distribution}:{name}, or uninstall the other"
        )
    return candidates[0]


def kind_of(selection: str, records: Sequence[PluginRecord]) -> Kind:
    """The kind of the only plugin with a name.

    Args:
        selection: A plugin's name, or `distribution:name`.
        records: What is installed.

    Raises:
        PluginNotFoundError: There is none.
        ConfigError: There are several kinds.
    """
    name = selection.rpartition(":")[2]
    named = [record for record in records if record.name == name]
    # Where the distribution is wrong, the kind is still right: `find` says which distribution has the name.
    meant = _selectable([record for record in named if _is_meant(selection, record)] or named)
    kinds = sorted({record.kind for record in meant}, key=KINDS.index)
    if len(kinds) > 1:
        raise ConfigError(f"{name} is the name of a {' and of a '.join(kinds)} plugin; say which with --kind")
    if kinds:
        return kinds[0]
    raise PluginNotFoundError("; ".join([f"no plugin named {name!r} is installed", *_hints(KINDS, name, records)]))


def _selectable(candidates: list[PluginRecord]) -> list[PluginRecord]:
    """Candidates that break no rule; all of them if none does, so that the reason is told."""
    return [record for record in candidates if record.status != "invalid"] or candidates


def _is_meant(selection: str, record: PluginRecord) -> bool:
    """True if a selection is the record's name, and its distribution's where it says one."""
    distribution, _, name = selection.rpartition(":")
    is_theirs = not distribution or canonicalize_name(record.distribution) == canonicalize_name(distribution)
    return record.name == name and is_theirs


def _not_found(kind: Kind, selection: str, records: Sequence[PluginRecord]) -> str:
    distribution, _, name = selection.rpartition(":")
    of_kind = [record for record in records if record.kind == kind]
    message = f"no {kind} plugin named {name!r} is installed"
    if "/" in distribution:
        return f"{kind} plugin {selection!r}: functions and classes are of a Python file, PATH.py:NAME"
    if distribution:
        message += f" by {distribution}"
    providers = sorted(record.distribution for record in of_kind if record.name == name)
    hints = [f"it is installed by {' and '.join(providers)}"] if providers else _hints([kind], name, of_kind)
    others = sorted({record.kind for record in records if record.name == name and record.kind != kind})
    hints += [f"{'an' if other[0] in 'ae' else 'a'} {other} plugin has that name" for other in others]
    return "; ".join([message, *hints])


def _hints(kinds: Collection[Kind], name: str, records: Iterable[PluginRecord]) -> list[str]:
    """Hints for a name that is not installed: where it may come from, or names like it; else those installed."""
    installed = {record.name for record in records}
    known = {other: distribution for (kind, other), distribution in KNOWN.items() if kind in kinds}
    if name in known:
        hints = [f"install it with: pip install {known[name]}"]
    else:
        close = nearest(name, sorted({*installed, *known}), limit=3)
        hints = [f"did you mean {' or '.join(close)}?"] if close else []
        hints += [f"{other} is installed with: pip install {known[other]}" for other in close if other not in installed]
    if autoload_disabled():
        hints.append(f"{DISABLE_VARIABLE} is set, so only the core's own plugins are seen")
    return hints or [f"installed: {', '.join(sorted(installed)) or 'none'}"]
