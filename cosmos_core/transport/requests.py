"""What a person, or whoever started its processes, can ask of a run that goes on."""

from __future__ import annotations

from typing import TypeAlias

import attrs

from cosmos_core.transport.bounds import Text, Word


@attrs.frozen(kw_only=True)
class Stop:
    """End the run with a checkpoint at the next step boundary."""


@attrs.frozen(kw_only=True)
class Drain:
    """Let a replica finish what it has begun, and leave; nothing else is lost with it."""

    name: Word


@attrs.frozen(kw_only=True)
class Set:
    """Change dynamic keys of the recipe, all at one step boundary: the next step that has not been ordered."""

    overrides: tuple[Word, ...]
    """Each `KEY=VALUE`, as of `--set`."""


@attrs.frozen(kw_only=True)
class Lost:
    """Take a replica for lost at once: whoever started its process saw it end, and silence would tell it later."""

    name: Word
    incarnation: Word
    reason: Text


Request: TypeAlias = Stop | Drain | Set | Lost
