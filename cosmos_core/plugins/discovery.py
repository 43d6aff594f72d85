"""Finds installed plugins in package metadata alone: no plugin is imported, so none can break the listing."""

from __future__ import annotations

import difflib
import os
import re
import shlex
import unicodedata
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from importlib.metadata import EntryPoint
from typing import Final, Literal, TypeAlias

import attrs
from packaging.utils import canonicalize_name

from cosmos_core.plugins.compatibility import (
    CORE,
    core_requirements,
    incompatibility,
    malformed_requirement,
    unmet_requirements,
)
from cosmos_core.plugins.distributions import Identity, Readable, distributions, exists, identity
from cosmos_core.protocols import KINDS, Kind
from cosmos_core.protocols.provider import entry_point_group

_GROUPS: Final = {entry_point_group(kind): kind for kind in KINDS}
_WORDS: Final = {group.partition(".")[2]: kind for group, kind in _GROUPS.items()}
_OURS: Final = re.compile(r"cosmos[-_.]?core[-_.]([^.]+)", re.IGNORECASE)
_SHORT: Final = re.compile(rf"cosmos[-_.]({'|'.join(KINDS)})s?", re.IGNORECASE)
"""A group that another project may well have: an entry point for the core only where the distribution requires it."""
_LIKENESS: Final = 0.85
"""Finds `cosmos_core.algoritms`; groups that a later release may add, such as `cosmos_core.nodes`, are left alone."""


@attrs.frozen
class Entry:
    """One line of `entry_points.txt`.

    Attributes:
        kind: What it plugs in; where the group is misspelt, what it must be meant to plug in.
        name: What users type.
        value: A module, or `module:object`.
        group: The group as it is written.
    """

    kind: Kind
    name: str
    value: str
    group: str

    @property
    def is_misspelt(self) -> bool:
        """True if its group is none of the core's, so that no recipe can select it."""
        return self.group not in _GROUPS

    @property
    def is_doubtful(self) -> bool:
        """True if its group is as likely that of another project."""
        return _SHORT.fullmatch(self.group) is not None


def entries(text: str) -> Iterator[Entry]:
    """Entry points for the core; a malformed line of another group must not hide them.

    Args:
        text: Content of `entry_points.txt`.
    """
    if "cosmo" not in text.lower():
        return
    group, kind = "", None
    for line in (raw.strip() for raw in text.splitlines()):
        if line.startswith("[") and line.endswith("]"):
            group = line[1:-1].strip()
            kind = _kind_of(group)
        elif kind is not None and line and not line.startswith(("#", ";")):
            name, _, value = line.partition("=")
            yield Entry(kind, name.strip(), value.strip(), group)


def _kind_of(group: str) -> Kind | None:
    """The kind that a group is for, or must be meant for; None for a group that is no business of the core."""
    if group in _GROUPS:
        return _GROUPS[group]
    ours = _OURS.fullmatch(group) or _SHORT.fullmatch(group)
    close = difflib.get_close_matches(ours[1].lower(), _WORDS, n=1, cutoff=_LIKENESS) if ours else []
    return _WORDS[close[0]] if close else None


RULE: Final = "a name is lower-case words of letters and digits joined by -, and begins with a letter"

_VALID: Final = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")


def is_valid(name: str) -> bool:
    """True if a name keeps the rule, so that it can be typed anywhere and be part of a package's name."""
    return _VALID.fullmatch(name) is not None


def nearest_valid(name: str) -> str:
    """A valid name that looks like `name`; empty if there is none."""
    plain = unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode()
    apart = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", plain).lower()
    return "-".join(re.findall(r"[a-z0-9]+", apart)).lstrip("-0123456789")


Status: TypeAlias = Literal["ok", "not judged", "not installed", "broken", "invalid", "conflict", "incompatible"]

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
        status: What metadata can tell. `not installed`: packages that it requires are not installed. `broken`: its
            module is missing, or a requirement is not met: an import must fail. `invalid`: its entry point breaks a
            rule of the core, so it is never imported. `not judged`: nobody asked (see `discover`).
        problem: Why it cannot be used; empty if nothing is known of that.
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
    """True if the environment asks for nothing but the core's own plugins."""
    return os.environ.get(DISABLE_VARIABLE, "") not in ("", "0")


def discover(kind: Kind | None = None, *, meant: Iterable[str] | None = None) -> list[PluginRecord]:
    """Every installed plugin, of one kind or of all, sorted by kind, name and distribution.

    Where only these selections are `meant`, what the plugins of other names require is not looked at, which takes most
    of the time: they are `not judged`.
    """
    names = None if meant is None else {selection.rpartition(":")[2] for selection in meant}
    records = [record for record in _all_records(names) if kind in (None, record.kind)]
    selectable = [record for record in records if record.status != "invalid"]
    providers = Counter((record.kind, record.name) for record in selectable)
    judged = [
        _with_conflict(record, selectable) if providers[record.kind, record.name] > 1 else record for record in records
    ]
    return sorted(judged, key=lambda record: (KINDS.index(record.kind), record.name, record.distribution))


def _all_records(names: Collection[str] | None) -> Iterator[PluginRecord]:
    """Records of each distribution; of several with one name, the first on `sys.path` is what an import finds."""
    found: dict[str, tuple[Readable, Identity]] = {}
    for dist in distributions():
        known = identity(dist)
        if known.name:
            found.setdefault(canonicalize_name(known.name), (dist, known))
    versions = {name: known.version for name, (_, known) in found.items()}
    only_core = autoload_disabled()
    for name, (dist, known) in found.items():
        if not only_core or name == CORE:
            for record in _records(dist, known):
                is_meant = record.status == "not judged" and (names is None or record.name in names)
                status, problem = _judged(record, versions) if is_meant else (record.status, record.problem)
                yield attrs.evolve(record, status=status, problem=problem)


def _records(dist: Readable, known: Identity) -> Iterator[PluginRecord]:
    claimed = list(entries(dist.read_text("entry_points.txt") or ""))
    # Parsing the rest of the metadata takes time: that of other packages is left alone.
    requires = tuple(dist.requires or ()) if claimed else ()
    is_for_core = bool(core_requirements(requires))
    found = [entry for entry in claimed if is_for_core or not entry.is_doubtful]
    for entry in found:
        record = PluginRecord(
            kind=entry.kind,
            name=entry.name,
            distribution=known.name,
            version=known.version or "unknown",
            module=entry.value,
            requires=requires,
            status="not judged",
        )
        problem = _broken_rule(entry, found)
        yield attrs.evolve(record, status="invalid", problem=problem) if problem else record


def _broken_rule(entry: Entry, others: Iterable[Entry]) -> str:
    """The rule of the core that an entry point breaks; empty if it keeps them all."""
    if entry.is_misspelt:
        return (
            f"its entry-point group {entry.group!r} is unknown to the core; write "
            f'[project.entry-points."{entry_point_group(entry.kind)}"] in its pyproject.toml'
        )
    if not is_valid(entry.name):
        example = nearest_valid(entry.name) or f"my-{entry.kind}"
        return f"a plugin cannot be named {entry.name!r}: {RULE}, such as {example}"
    kinds = sorted({other.kind for other in others if other.name == entry.name}, key=KINDS.index)
    if len(kinds) > 1:
        return f"one distribution gives the name {entry.name!r} to a {' and to a '.join(kinds)} plugin; rename one"
    return ""


def _judged(record: PluginRecord, versions: Mapping[str, str]) -> tuple[Status, str]:
    """The status and the problem that metadata and the file system tell."""
    match = EntryPoint.pattern.match(record.module)
    if match is None:
        return "broken", f"its entry point {record.name} = {record.module!r} names no module"
    extras = record.entry_point.extras
    if problem := malformed_requirement(record.requires):
        return "broken", problem
    if problem := incompatibility(record.distribution, record.requires, extras):
        return "incompatible", problem
    unmet = unmet_requirements(record.requires, versions, extras)
    problem = "; ".join(each.problem for each in unmet)
    if unmet and all(each.is_absent for each in unmet):
        return "not installed", f"{problem}; {shlex.join(['pip', 'install', *(each.requirement for each in unmet)])}"
    if not problem and not exists(match["module"]):
        problem = f"its module {match['module']} does not exist"
    return "broken" if problem else "ok", problem


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
