"""From the name in a recipe to one installed plugin, still without importing it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from packaging.utils import canonicalize_name

from cosmos_core.config.nearest import nearest
from cosmos_core.errors import PluginConflictError, PluginIncompatibleError, PluginNotFoundError
from cosmos_core.plugin.discovery import DISABLE_VARIABLE, PluginRecord, autoload_disabled
from cosmos_core.plugin.known import KNOWN, known_names
from cosmos_core.protocols import Kind


def choose(kind: Kind, selection: str, records: Sequence[PluginRecord]) -> PluginRecord:
    """The plugin that a selection means.

    Args:
        kind: What is wanted.
        selection: A plugin's name, or `distribution:name`.
        records: What is installed.

    Raises:
        PluginNotFoundError: Nothing installed has that name.
        PluginConflictError: Several distributions provide it, and the selection does not say which.
        PluginIncompatibleError: It was made for another release of the core.
    """
    distribution, _, name = selection.rpartition(":")
    candidates = [
        record
        for record in records
        if (record.kind, record.name) == (kind, name)
        and (not distribution or canonicalize_name(record.distribution) == canonicalize_name(distribution))
    ]
    if not candidates:
        raise PluginNotFoundError(_not_found(kind, selection, records))
    if len(candidates) > 1:
        providers = " and by ".join(f"{record.distribution} {record.version}" for record in candidates)
        raise PluginConflictError(
            f"{kind} plugin {name!r} is provided by {providers}; "
            f"write which one, for example {candidates[0].distribution}:{name}, or uninstall the other"
        )
    (record,) = candidates
    if record.status == "incompatible":
        raise PluginIncompatibleError(
            f"{kind} plugin {name!r} of {record.distribution} {record.version} cannot be used: {record.problem}; "
            f"install a release of {record.distribution} made for it"
        )
    return record


def _not_found(kind: Kind, selection: str, records: Sequence[PluginRecord]) -> str:
    distribution, _, name = selection.rpartition(":")
    of_kind = [record for record in records if record.kind == kind]
    message = f"no {kind} plugin named {name!r} is installed"
    if distribution:
        message += f" by {distribution}"
    return "; ".join([message, *_hints(kind, name, of_kind), *_elsewhere(kind, name, records)])


def _hints(kind: Kind, name: str, of_kind: Iterable[PluginRecord]) -> list[str]:
    installed = {record.name for record in of_kind}
    if name in installed:
        providers = sorted(record.distribution for record in of_kind if record.name == name)
        return [f"it is installed by {' and '.join(providers)}"]
    hints = []
    if (kind, name) in KNOWN:
        hints.append(f"install it with: pip install {KNOWN[kind, name]}")
    else:
        hints += _nearest(kind, name, installed)
    if autoload_disabled():
        hints.append(f"{DISABLE_VARIABLE} is set, so only the core's own plugins are seen")
    return hints or [f"installed: {', '.join(sorted(installed)) or 'none'}"]


def _nearest(kind: Kind, name: str, installed: set[str]) -> list[str]:
    close = nearest(name, sorted({*installed, *known_names(kind)}), limit=3)
    hints = [f"did you mean {' or '.join(close)}?"] if close else []
    return hints + [
        f"{other} is installed with: pip install {KNOWN[kind, other]}" for other in close if other not in installed
    ]


def _elsewhere(kind: Kind, name: str, records: Iterable[PluginRecord]) -> list[str]:
    """Other kinds that have the name."""
    kinds = sorted({record.kind for record in records if record.name == name and record.kind != kind})
    return [f"a {other} plugin has that name" for other in kinds]
