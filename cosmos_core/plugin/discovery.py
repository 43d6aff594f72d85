"""Which plugins are installed, from package metadata alone: no plugin is imported, so none can break the listing."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from importlib.machinery import PathFinder
from importlib.metadata import Distribution, EntryPoint
from typing import Final, Literal, TypeAlias

import attrs
from packaging.utils import canonicalize_name

from cosmos_core.plugin.compatibility import CORE, incompatibility, malformed_requirement, unmet_requirements
from cosmos_core.plugin.entries import Entry, entries
from cosmos_core.plugin.source import Identity, identity
from cosmos_core.protocols import KINDS, Kind, entry_point_group

Status: TypeAlias = Literal["ok", "broken", "invalid", "conflict", "incompatible"]

DISABLE_VARIABLE: Final = "COSMOS_DISABLE_PLUGIN_AUTOLOAD"


@attrs.frozen(kw_only=True)
class PluginRecord:
    """One entry point, as its distribution's metadata describes it.

    Attributes:
        kind: What it plugs in.
        name: What users type.
        distribution: The distribution that provides it.
        version: Version of that distribution.
        module: The entry point's value: a module, or `module:object`.
        requires: `Requires-Dist` lines of the distribution.
        status: What metadata can tell. `broken`: a module or a requirement is missing, so an import must fail.
            `invalid`: its entry point breaks a rule of the core, so it is never imported.
        problem: Why it is not `ok`; empty if it is.
    """

    kind: Kind
    name: str
    distribution: str
    version: str
    module: str
    requires: tuple[str, ...] = ()
    status: Status = "ok"
    problem: str = ""

    @property
    def entry_point(self) -> EntryPoint:
        """The entry point; its `load` imports the plugin."""
        return EntryPoint(name=self.name, value=self.module, group=entry_point_group(self.kind))


def autoload_disabled() -> bool:
    """Whether the environment asks for nothing but the core's own plugins."""
    return os.environ.get(DISABLE_VARIABLE, "") not in ("", "0")


def discover(kind: Kind | None = None) -> list[PluginRecord]:
    """Every installed plugin, of one kind or of all, sorted by kind, name and distribution."""
    records = [record for record in _all_records() if kind in (None, record.kind)]
    providers = Counter((record.kind, record.name) for record in records)
    judged = [
        _with_conflict(record, records) if providers[record.kind, record.name] > 1 else record for record in records
    ]
    return sorted(judged, key=lambda record: (KINDS.index(record.kind), record.name, record.distribution))


def _all_records() -> Iterator[PluginRecord]:
    """What each distribution provides; of several with one name, the first on `sys.path` is what an import finds."""
    found: dict[str, tuple[Distribution, Identity]] = {}
    for dist in importlib.metadata.distributions():
        known = identity(dist)
        if known.name:
            found.setdefault(canonicalize_name(known.name), (dist, known))
    versions = {name: known.version for name, (_, known) in found.items()}
    only_core = autoload_disabled()
    for name, (dist, known) in found.items():
        if not only_core or name == CORE:
            yield from _records(dist, known, versions)


def _records(dist: Distribution, known: Identity, versions: Mapping[str, str]) -> Iterator[PluginRecord]:
    found = list(entries(dist.read_text("entry_points.txt") or ""))
    for entry in found:
        record = PluginRecord(
            kind=entry.kind,
            name=entry.name,
            distribution=known.name,
            version=known.version or "unknown",
            module=entry.value,
            requires=tuple(dist.requires or ()),
        )
        problem = _broken_rule(entry, found)
        yield attrs.evolve(record, status="invalid", problem=problem) if problem else _judge(record, versions)


def _broken_rule(entry: Entry, others: Iterable[Entry]) -> str:
    """Which rule of the core an entry point breaks; empty if it keeps them all."""
    if entry.is_misspelt:
        return (
            f"its entry-point group {entry.group!r} is unknown to the core; write "
            f'[project.entry-points."{entry_point_group(entry.kind)}"] in its pyproject.toml'
        )
    kinds = sorted({other.kind for other in others if other.name == entry.name}, key=KINDS.index)
    if len(kinds) > 1:
        return f"one distribution gives the name {entry.name!r} to a {' and to a '.join(kinds)} plugin; rename one"
    return ""


def _judge(record: PluginRecord, versions: Mapping[str, str]) -> PluginRecord:
    """What metadata and the file system can tell of a record."""
    match = EntryPoint.pattern.match(record.module)
    if match is None:
        problem = f"its entry point {record.name} = {record.module!r} names no module"
        return attrs.evolve(record, status="broken", problem=problem)
    extras = record.entry_point.extras
    problem = malformed_requirement(record.requires)
    if problem:
        return attrs.evolve(record, status="broken", problem=problem)
    problem = incompatibility(record.distribution, record.requires, extras)
    if problem:
        return attrs.evolve(record, status="incompatible", problem=problem)
    problem = unmet_requirements(record.requires, versions, extras) or _missing_module(match["module"])
    return attrs.evolve(record, status="broken", problem=problem) if problem else record


def _missing_module(module: str) -> str:
    """Why a module cannot be imported; empty if it can be found. Packages on the way are not imported."""
    top, *rest = module.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        spec = None
    for part in rest:
        if spec is None or spec.submodule_search_locations is None:
            break
        spec = PathFinder.find_spec(f"{spec.name}.{part}", spec.submodule_search_locations)
    return f"its module {module} does not exist" if spec is None else ""


def _with_conflict(record: PluginRecord, records: list[PluginRecord]) -> PluginRecord:
    if record.status in ("incompatible", "invalid"):
        return record
    rivals = sorted(
        f"{other.distribution} {other.version}"
        for other in records
        if (other.kind, other.name) == (record.kind, record.name)
    )
    problem = f"provided by {' and by '.join(rivals)}; select one as DISTRIBUTION:{record.name}"
    return attrs.evolve(record, status="conflict", problem=problem)
