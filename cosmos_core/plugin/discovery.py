"""Which plugins are installed, from package metadata alone: no plugin is imported, so none can break the listing."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from collections import Counter
from collections.abc import Iterator
from importlib.machinery import PathFinder
from importlib.metadata import Distribution, EntryPoint
from typing import Final, Literal, TypeAlias

import attrs
from packaging.utils import canonicalize_name

from cosmos_core.plugin.compatibility import CORE, incompatibility, malformed_requirement, unmet_requirements
from cosmos_core.protocols import KINDS, Kind, entry_point_group

Status: TypeAlias = Literal["ok", "broken", "conflict", "incompatible"]

DISABLE_VARIABLE: Final = "COSMOS_DISABLE_PLUGIN_AUTOLOAD"
_GROUPS: Final = {entry_point_group(kind): kind for kind in KINDS}


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
    records = [record for dist in _distributions() for record in _records(dist) if kind in (None, record.kind)]
    providers = Counter((record.kind, record.name) for record in records)
    judged = [
        _with_conflict(record, records) if providers[record.kind, record.name] > 1 else record for record in records
    ]
    return sorted(judged, key=lambda record: (KINDS.index(record.kind), record.name, record.distribution))


def _distributions() -> Iterator[Distribution]:
    """Installed distributions, each name once: the first on `sys.path` is the one that an import finds."""
    seen: set[str] = set()
    only_core = autoload_disabled()
    for dist in importlib.metadata.distributions():
        name = canonicalize_name(_field(dist, "Name"))
        if not name or name in seen:
            continue
        seen.add(name)
        if not only_core or name == CORE:
            yield dist


def _field(dist: Distribution, key: str) -> str:
    """A metadata field; empty where it is missing, as in what an interrupted pip leaves behind."""
    try:
        metadata = dist.metadata
    except FileNotFoundError:
        return ""
    return metadata[key] if key in metadata else ""  # noqa: SIM401  # `get` is not in its protocol on Python 3.11


def _records(dist: Distribution) -> Iterator[PluginRecord]:
    for kind, name, value in _entries(dist.read_text("entry_points.txt") or ""):
        requires = tuple(dist.requires or ())
        record = PluginRecord(
            kind=kind,
            name=name,
            distribution=_field(dist, "Name"),
            version=_field(dist, "Version") or "unknown",
            module=value,
            requires=requires,
        )
        yield _judge(record)


def _entries(text: str) -> Iterator[tuple[Kind, str, str]]:
    """Entry points of the plugin groups; a malformed line of another group must not hide them."""
    if "cosmos_core." not in text:
        return
    group = ""
    for line in (raw.strip() for raw in text.splitlines()):
        if line.startswith("[") and line.endswith("]"):
            group = line[1:-1].strip()
        elif group in _GROUPS and line and not line.startswith(("#", ";")):
            name, _, value = line.partition("=")
            yield _GROUPS[group], name.strip(), value.strip()


def _judge(record: PluginRecord) -> PluginRecord:
    """What metadata and the file system can tell of a record."""
    match = EntryPoint.pattern.match(record.module)
    if match is None:
        problem = f"its entry point {record.name} = {record.module!r} names no module"
        return attrs.evolve(record, status="broken", problem=problem)
    extras = record.entry_point.extras
    problem = malformed_requirement(record.requires)
    if problem:
        return attrs.evolve(record, status="broken", problem=problem)
    problem = incompatibility(record.requires, extras)
    if problem:
        return attrs.evolve(record, status="incompatible", problem=problem)
    problem = unmet_requirements(record.requires, extras) or _missing_module(match["module"])
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
    if record.status == "incompatible":
        return record
    rivals = sorted(
        f"{other.distribution} {other.version}"
        for other in records
        if (other.kind, other.name) == (record.kind, record.name)
    )
    problem = f"provided by {' and by '.join(rivals)}; select one as DISTRIBUTION:{record.name}"
    return attrs.evolve(record, status="conflict", problem=problem)
