"""What a distribution says of itself: description, licence, the Pythons and the releases of the core it is for."""

from __future__ import annotations

import platform
import shlex
from collections.abc import Iterator, Mapping
from email.message import Message
from importlib.metadata import Distribution, EntryPoint
from typing import Final, cast

from packaging.requirements import Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name

from cosmos_core.plugins.compatibility import (
    CORE,
    core_bounds,
    core_excess,
    core_requirements,
    malformed_requirement,
    unmet_requirements,
)
from cosmos_core.plugins.discovery import PluginRecord, entries
from cosmos_core.plugins.distributions import distributions, field, identity, licence
from cosmos_core.testing.check.subject import Subject
from cosmos_core.testing.check.verdict import Check, Finding, Level, faults

_LEVELS: Final[Mapping[str, Level]] = {"broken": "fault", "invalid": "fault", "conflict": "warning"}


def check_metadata(subject: Subject) -> Check:
    """Whether the description is complete."""
    dist = subject.distribution
    findings = [*_description(dist), *_pythons(dist), *_name(subject)]
    return Check("metadata", licence(dist), tuple(findings))


def check_compatibility(subject: Subject) -> Check:
    """Whether it can be used with this release of the core and with what is installed."""
    requires = subject.distribution.requires or []
    is_core = canonicalize_name(subject.name) == CORE
    bounds, excess = ("", "") if is_core else (core_bounds(requires), core_excess(requires))
    # Each record of a distribution may tell the same.
    told = dict.fromkeys(each.problem for each in subject.records if each.status == "incompatible")
    missing = dict.fromkeys(each for record in subject.records for each in _missing(record))
    findings = (
        *faults([bounds, *told]),
        *((Finding("warning", excess),) if excess and not bounds else ()),
        *(Finding("not run", each) for each in missing),
    )
    return Check("requirements", ", ".join(map(str, core_requirements(requires))), findings)


def check_entry_points(subject: Subject) -> Check:
    """Whether a recipe can select each of its plugins."""
    named = ", ".join(f"{record.kind} {record.name}" for record in subject.records)
    unusable = [
        Finding(_LEVELS[record.status], f"{record.kind} {record.name}: {record.problem}")
        for record in subject.records
        if record.status in _LEVELS and not _missing(record)
    ]
    return Check("entry points", named, (*faults([subject.stale]), *unusable))


def _missing(record: PluginRecord) -> list[str]:
    """What a plugin asks for that is not here, each with the line that installs it; it may be fine where that is."""
    if (
        record.status != "broken"
        or not EntryPoint.pattern.match(record.module)
        or malformed_requirement(record.requires)
    ):
        return []
    versions: dict[str, str] = {canonicalize_name(each.name): each.version for each in map(identity, distributions())}
    extras = record.entry_point.extras
    unmet = ((line, unmet_requirements([line], versions, extras)) for line in record.requires)
    return [f"{problem}; {_install(Requirement(line))}" for line, problem in unmet if problem]


def _install(requirement: Requirement) -> str:
    requirement.marker = None
    return f"pip install {shlex.quote(str(requirement))}"


def _description(dist: Distribution) -> Iterator[Finding]:
    if not licence(dist):
        yield Finding("fault", 'it has no licence, so nobody may use it; add license = "Apache-2.0" to [project]')
    if not field(dist, "Summary"):
        yield Finding("warning", 'it has no summary; add description = "…" to [project]')
    message = cast("Message", dist.metadata)
    if not (field(dist, "Description") or str(message.get_payload() or "").strip()):
        yield Finding("warning", 'it has no description; add readme = "README.md" to [project]')


def _pythons(dist: Distribution) -> Iterator[Finding]:
    asked = field(dist, "Requires-Python")
    if not asked:
        yield Finding("fault", 'it does not say which Pythons it is for; add requires-python = ">=3.11" to [project]')
        return
    try:
        fits = SpecifierSet(asked).contains(platform.python_version(), prereleases=True)
    except InvalidSpecifier:
        yield Finding("fault", f"Requires-Python is {asked!r}, which is no version specifier such as >=3.11")
        return
    if not fits:
        yield Finding("fault", f"it requires Python {asked}, this is {platform.python_version()}")


def _name(subject: Subject) -> Iterator[Finding]:
    """Others guess the install line of an unknown plugin from its kind and name."""
    name = canonicalize_name(subject.name)
    provided = list(entries(subject.distribution.read_text("entry_points.txt") or ""))
    if name != CORE and not any(name.startswith(f"cosmos-{entry.kind}-") for entry in provided):
        kind, plugin = provided[0].kind, provided[0].name
        yield Finding("note", f"it is named {name}; cosmos-{kind}-{plugin} would be found by whoever guesses its name")
