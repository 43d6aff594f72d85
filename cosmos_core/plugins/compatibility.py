"""Compares a plugin with this release of the core: its `Requires-Dist` before import, its protocol number after.

`requires` are the `Requires-Dist` lines of a distribution, `extras` those that its entry point asks for.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

import attrs
from packaging.markers import UndefinedComparison, UndefinedEnvironmentName
from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from cosmos_core import __version__
from cosmos_core.protocols import PROTOCOL_VERSIONS, Kind
from cosmos_core.protocols.provider import DEPRECATED_PROTOCOLS

CORE: Final = "cosmos-core"
_LOWER: Final = frozenset({">=", ">", "~=", "=="})


def incompatibility(distribution: str, requires: Iterable[str], extras: Iterable[str] = ()) -> str:
    """The reason why a distribution's requirements exclude this core, and what to do; empty if they do not."""
    for requirement in core_requirements(requires, extras):
        if not requirement.specifier.contains(__version__, prereleases=True):
            remedy = _upgrade(CORE if _is_above(requirement.specifier) else distribution)
            return f"it requires {requirement.name}{requirement.specifier}, this is {CORE} {__version__}; {remedy}"
    return ""


def core_requirements(requires: Iterable[str], extras: Iterable[str] = ()) -> list[Requirement]:
    """Requirements of a distribution on the core."""
    return [each for each in _active(requires, extras) if canonicalize_name(each.name) == CORE]


@attrs.frozen
class Unmet:
    """A requirement that is not met.

    Attributes:
        problem: The package, the version that is required and the one that there is, in words.
        requirement: The requirement as pip takes it.
        is_absent: True if there is no such package at all.
    """

    problem: str
    requirement: str
    is_absent: bool


def unmet_requirements(
    requires: Iterable[str], versions: Mapping[str, str], extras: Iterable[str] = ()
) -> Sequence[Unmet]:
    """Requirements that `versions`, which are by canonical name, lack or do not meet; of several extras one will do."""
    return min(([*_unmet(requires, versions, extra)] for extra in [*extras] or [""]), key=len)


def _unmet(requires: Iterable[str], versions: Mapping[str, str], extra: str) -> Iterator[Unmet]:
    for requirement in _active(requires, [extra]):
        version, plain = versions.get(canonicalize_name(requirement.name), ""), copy.copy(requirement)
        plain.marker = None
        if not version:
            yield Unmet(f"{requirement.name} is not installed", str(plain), is_absent=True)
        elif not _admits(requirement, version):
            problem = f"{requirement.name}{requirement.specifier} is required, {version} is installed"
            yield Unmet(problem, str(plain), is_absent=False)


def malformed_requirement(requires: Iterable[str]) -> str:
    """The first requirement that cannot be read; empty if all can."""
    for line in requires:
        if _requirement(line) is None:
            return f"its metadata has a malformed requirement, {line!r}"
    return ""


def protocol_mismatch(kind: Kind, protocol: object, distribution: str) -> str:
    """The reason why a provider's protocol number is not accepted, and what to do; empty if it is."""
    spoken = PROTOCOL_VERSIONS[kind]
    if type(protocol) is not int:
        return f"Provider.protocol is {protocol!r}; give the version it was written for, an integer such as {spoken}"
    if protocol == spoken or protocol_deprecation(kind, protocol):
        return ""
    remedy = (
        f"it needs a newer {CORE}: {_upgrade(CORE)}"
        if protocol > spoken
        else f"it needs a newer release of the plugin: {_upgrade(distribution)}"
    )
    return (
        f"it was written for version {protocol} of the {kind} protocol, {CORE} {__version__} speaks {spoken}; {remedy}"
    )


def protocol_deprecation(kind: Kind, protocol: int) -> str:
    """The warning about a protocol version that is still accepted and will not be for long; empty for any other."""
    end = DEPRECATED_PROTOCOLS.get(kind, {}).get(protocol)
    if end is None:
        return ""
    return (
        f"it was written for version {protocol} of the {kind} protocol, which {CORE} {end} will refuse; "
        f"the current version is {PROTOCOL_VERSIONS[kind]}"
    )


def _upgrade(distribution: str) -> str:
    return f"pip install -U {distribution}"


def _is_above(specifier: SpecifierSet) -> bool:
    """True if a specifier that excludes this release asks for a newer one."""
    this = Version(__version__)
    return any(
        Version(each.version.removesuffix(".*")) >= this and not each.contains(this, prereleases=True)
        for each in specifier
        if each.operator in _LOWER
    )


def _active(requires: Iterable[str], extras: Iterable[str]) -> Iterator[Requirement]:
    """The well-formed requirements that hold here, those of `extras` included."""
    for line in requires:
        requirement = _requirement(line)
        environments = [{"extra": extra} for extra in ("", *extras)]
        if requirement is not None and any(_holds(requirement, each) for each in environments):
            yield requirement


@functools.cache
def _requirement(line: str) -> Requirement | None:
    """A requirement, if it can be read and its marker has a meaning."""
    try:
        requirement = Requirement(line)
        _holds(requirement, {"extra": ""})
    except (InvalidRequirement, UndefinedComparison, UndefinedEnvironmentName, InvalidVersion):
        return None
    return requirement


def _holds(requirement: Requirement, environment: dict[str, str]) -> bool:
    return requirement.marker is None or requirement.marker.evaluate(environment)


def _admits(requirement: Requirement, version: str) -> bool:
    """True if an installed version will do; one that is no version never does."""
    try:
        return requirement.specifier.contains(version, prereleases=True)
    except InvalidVersion:
        return False
