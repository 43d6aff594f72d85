"""Whether a plugin was made for this release: its `Requires-Dist` before import, its protocol number after."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from cosmos_core import __version__
from cosmos_core.protocols import PROTOCOL_VERSIONS, Kind
from cosmos_core.protocols.versions import DEPRECATED_PROTOCOLS

CORE: Final = "cosmos-core"
_LOWER: Final = frozenset({">=", ">", "~=", "=="})
_UPPER: Final = frozenset({"<", "<=", "~=", "=="})


def incompatibility(distribution: str, requires: Iterable[str], extras: Iterable[str] = ()) -> str:
    """Why a distribution's requirements exclude this release of the core, and what to do; empty if they do not.

    Args:
        distribution: Its name.
        requires: Its `Requires-Dist` lines.
        extras: Extras that the entry point asks for.
    """
    for requirement in core_requirements(requires, extras):
        if not requirement.specifier.contains(__version__, prereleases=True):
            remedy = _upgrade(CORE if _is_above(requirement.specifier) else distribution)
            return f"it requires {requirement.name}{requirement.specifier}, this is {CORE} {__version__}; {remedy}"
    return ""


def core_requirements(requires: Iterable[str], extras: Iterable[str] = ()) -> list[Requirement]:
    """What a distribution asks of the core."""
    return [each for each in _active(requires, extras) if canonicalize_name(each.name) == CORE]


def core_bounds(requires: Iterable[str]) -> str:
    """What is wrong with how a distribution asks for the core: it must, and with both bounds; empty if nothing is.

    Args:
        requires: Its `Requires-Dist` lines.
    """
    this = Version(__version__)
    example = f"{CORE}>={this.major}.{this.minor},<{this.major}.{this.minor + 1}"
    asked = [requirement.specifier for requirement in core_requirements(requires)]
    if not asked:
        return f"it does not require {CORE}; add {example!r} to its dependencies"
    operators = {each.operator for specifier in asked for each in specifier}
    bounds = (("a lower", _LOWER), ("an upper", _UPPER))
    missing = " and ".join(bound for bound, signs in bounds if not operators & signs)
    return f"it requires {CORE}{asked[0]}, without {missing} bound; write {example!r}" if missing else ""


def unmet_requirements(requires: Iterable[str], versions: Mapping[str, str], extras: Iterable[str] = ()) -> str:
    """Which requirements are not installed, or not in the version asked for; empty if all are.

    Args:
        requires: The `Requires-Dist` lines of a distribution.
        versions: What is installed, by canonical name.
        extras: Extras that the entry point asks for.
    """
    problems = []
    for requirement in _active(requires, extras):
        version = versions.get(canonicalize_name(requirement.name), "")
        if not version:
            problems.append(f"{requirement.name} is not installed")
        elif not requirement.specifier.contains(version, prereleases=True):
            problems.append(f"{requirement.name}{requirement.specifier} is required, {version} is installed")
    return "; ".join(problems)


def malformed_requirement(requires: Iterable[str]) -> str:
    """The first requirement that cannot be read; empty if all can."""
    for line in requires:
        try:
            Requirement(line)
        except InvalidRequirement:
            return f"its metadata has a malformed requirement, {line!r}"
    return ""


def protocol_mismatch(kind: Kind, protocol: object, distribution: str) -> str:
    """Why a provider's protocol number is not accepted here, and what to do; empty if it is.

    Args:
        kind: The plugin's kind.
        protocol: What its provider says.
        distribution: The distribution that provides it.
    """
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
    """What to say of a protocol version that is still accepted and will not be for long; empty for any other."""
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
    """Whether a specifier that excludes this release asks for a newer one."""
    this = Version(__version__)
    return any(
        Version(each.version.removesuffix(".*")) >= this and not each.contains(this, prereleases=True)
        for each in specifier
        if each.operator in _LOWER
    )


def _active(requires: Iterable[str], extras: Iterable[str]) -> Iterator[Requirement]:
    """The well-formed requirements that hold here, those of `extras` included."""
    for line in requires:
        try:
            requirement = Requirement(line)
        except InvalidRequirement:
            continue
        environments = [{"extra": extra} for extra in ("", *extras)]
        if requirement.marker is None or any(requirement.marker.evaluate(each) for each in environments):
            yield requirement
