"""One integer per plugin kind: the protocol version that this release of the core speaks.

A plugin declares the version it was written for in its provider; it is raised when a change breaks
plugins of that kind. Kinds are also the entry-point groups, `cosmos_core.<kind>s`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal, TypeAlias

Kind: TypeAlias = Literal["model", "algorithm", "reward", "dataset", "engine", "environment", "launcher", "hook"]

PROTOCOL_VERSIONS: Final[Mapping[Kind, int]] = {
    "model": 1,
    "algorithm": 1,
    "reward": 1,
    "dataset": 1,
    "engine": 1,
    "environment": 1,
    "launcher": 1,
    "hook": 1,
}

DEPRECATED_PROTOCOLS: Final[Mapping[Kind, Mapping[int, str]]] = {}
"""Older versions that are still accepted, each with the release of the core that will refuse it."""

KINDS: Final[tuple[Kind, ...]] = tuple(PROTOCOL_VERSIONS)


def entry_point_group(kind: Kind) -> str:
    """The entry-point group in which plugins of `kind` are found."""
    return f"cosmos_core.{kind}s"
