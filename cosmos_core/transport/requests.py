"""What a person can ask of a run that goes on."""

from __future__ import annotations

from typing import TypeAlias

import attrs


@attrs.frozen(kw_only=True)
class Stop:
    """End the run with a checkpoint at the next step boundary."""


@attrs.frozen(kw_only=True)
class Drain:
    """Let a replica finish what it has begun, and leave; nothing else is lost with it."""

    name: str


@attrs.frozen(kw_only=True)
class Set:
    """Change dynamic keys of the recipe, all at one step boundary: the next step that has not been ordered."""

    overrides: tuple[str, ...]
    """Each `KEY=VALUE`, as of `--set`."""


Request: TypeAlias = Stop | Drain | Set
