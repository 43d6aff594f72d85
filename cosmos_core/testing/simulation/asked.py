"""What people asked dynamic keys to be, and from which step on: a write-ahead log apart from the machine's."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Final

from cosmos_core.control.machine.records import SettingChange
from cosmos_core.control.machine.settings import Settings
from cosmos_core.transport.requests import Set
from cosmos_core.types import Scalar

_PACE: Final = ("sync.interval", "sync.max_staleness")


class Asked:
    """Changes that were taken in, each with the first step at which it holds."""

    def __init__(self) -> None:
        self._changes: list[tuple[int, str, Scalar]] = []
        self._ordered = 0
        """The newest step that was ordered."""

    def order(self, step: int) -> None:
        """A step was ordered: what is asked for later does not hold at it."""
        self._ordered = max(self._ordered, step)

    def ask(self, request: Set, step: int) -> None:
        """Somebody's request was taken in while so many steps were done."""
        first = max(step, self._ordered) + 1
        for override in request.overrides:
            key, _, value = override.partition("=")
            self._changes.append((first, key, json.loads(value)))

    def undo(self, step: int) -> None:
        """The run goes on from a step; of what was asked for, that stays which holds at the next one."""
        self._changes = [change for change in self._changes if change[0] <= step + 1]
        self._ordered = step

    def recover(self, known: Iterable[SettingChange], step: int) -> None:
        """Only the snapshot of a step is left: it may have been written before the last changes at the next step."""
        kept = [change for change in self._changes if change[0] <= step]
        self._changes = [*kept, *((each.step, each.key, each.after) for each in known if each.step > step)]

    def paced(self, settings: Settings, step: int) -> int:
        """The newest step, up to this one, from which on weights are published at another pace; 0: none."""
        found, values = 0, {key.key: key.value for key in settings.dynamic}
        for first, key, value in self._changes:
            if first <= step and values[key] != value:
                values[key] = value
                found = first if key in _PACE else found
        return found

    def values(self, settings: Settings, step: int) -> dict[str, Scalar]:
        """Of dynamic keys at a step, those that are not as in the recipe: the newest change counts."""
        found = {key: value for first, key, value in self._changes if first <= step}
        return {key.key: found[key.key] for key in settings.dynamic if found.get(key.key, key.value) != key.value}
