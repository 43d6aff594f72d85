"""Bounds that a plugin's distribution sets to the release of the core that it may be used with."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import version
from typing import Final

from packaging.version import Version

from cosmos_core.plugins.compatibility import CORE, core_requirements

_LOWER: Final = frozenset({">=", ">", "~=", "=="})
_UPPER: Final = frozenset({"<", "<=", "~=", "=="})


def core_bounds(requires: Iterable[str]) -> str:
    """A problem of a distribution's requirement on the core, which needs both bounds; empty if there is none."""
    asked = [requirement.specifier for requirement in core_requirements(requires)]
    if not asked:
        return f"it does not require {CORE}; add {_example()!r} to its dependencies"
    operators = {each.operator for specifier in asked for each in specifier}
    bounds = (("a lower", _LOWER), ("an upper", _UPPER))
    missing = " and ".join(bound for bound, signs in bounds if not operators & signs)
    return f"it requires {CORE}{asked[0]}, without {missing} bound; write {_example()!r}" if missing else ""


def core_excess(requires: Iterable[str]) -> str:
    """A warning that a distribution admits the next release of the core, which may break it; empty if it does not."""
    asked = [requirement.specifier for requirement in core_requirements(requires)]
    following = _next_release()
    if not asked or not all(each.contains(following) for each in asked):
        return ""
    return (
        f"it requires {CORE}{asked[0]}, which admits {following}, a release that it cannot have been tried with; "
        f"write {_example()!r}"
    )


def _next_release() -> Version:
    """The next release that may break plugins: the next minor one before 1.0, the next major one from there on."""
    this = Version(version(CORE))
    return Version(f"0.{this.minor + 1}" if this.major == 0 else f"{this.major + 1}.0")


def _example() -> str:
    this = Version(version(CORE))
    return f"{CORE}>={this.major}.{this.minor},<{_next_release()}"
