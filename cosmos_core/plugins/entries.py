"""The entry points of a distribution that are for cosmos-core, and those that must be meant for it."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from typing import Final

import attrs

from cosmos_core.protocols import KINDS, Kind, entry_point_group

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
        """Whether its group is none of the core's, so that no recipe can select it."""
        return self.group not in _GROUPS

    @property
    def is_doubtful(self) -> bool:
        """Whether its group is as likely that of another project."""
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
