"""Whether a plugin was made for this release: its `Requires-Dist` before import, its protocol number after."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable, Iterator
from typing import Final

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from cosmos_core import __version__
from cosmos_core.protocols import PROTOCOL_VERSIONS, Kind

CORE: Final = "cosmos-core"


def incompatibility(requires: Iterable[str], extras: Iterable[str] = ()) -> str:
    """Why a distribution's requirements exclude this release of the core; empty if they do not.

    Args:
        requires: Its `Requires-Dist` lines.
        extras: Extras that the entry point asks for.
    """
    for requirement in _active(requires, extras):
        fits = requirement.specifier.contains(__version__, prereleases=True)
        if canonicalize_name(requirement.name) == CORE and not fits:
            return f"it requires {requirement.name}{requirement.specifier}, this is {CORE} {__version__}"
    return ""


def unmet_requirements(requires: Iterable[str], extras: Iterable[str] = ()) -> str:
    """Which requirements are not installed, or not in the version asked for; empty if all are."""
    problems = []
    for requirement in _active(requires, extras):
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            problems.append(f"{requirement.name} is not installed")
            continue
        if not requirement.specifier.contains(version, prereleases=True):
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


def protocol_mismatch(kind: Kind, protocol: object) -> str:
    """Why a provider's protocol number is not the one spoken here; empty if it is."""
    spoken = PROTOCOL_VERSIONS[kind]
    if protocol == spoken:
        return ""
    return f"it was written for version {protocol!r} of the {kind} protocol, {CORE} {__version__} speaks {spoken}"


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
