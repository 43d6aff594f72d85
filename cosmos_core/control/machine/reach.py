"""Which steps go by a dynamic key: those of its stage; and from which of them on a change counts."""

from __future__ import annotations

from typing import Final

from cosmos_core.control.machine import changes
from cosmos_core.control.machine.settings import Settings
from cosmos_core.control.machine.state import State
from cosmos_core.transport.messages import Settable
from cosmos_core.types import Scalar

_WARMUP: Final = "warmup."
_WHOLE_RUN: Final = "policy.checkpoint."
"""Beginnings of keys; all others are of the main stage."""


def steps_of(settings: Settings, key: str) -> range:
    """The steps that go by a dynamic key."""
    first = settings.stages[0]
    if key.startswith(_WARMUP):
        return range(1, first.last_step + 1)
    if key.startswith(_WHOLE_RUN):
        return range(1, settings.last_step + 1)
    return range(settings.main.first_version + 1, settings.last_step + 1)


def first_step(settings: Settings, key: str, step: int) -> int:
    """The first step that goes by a change of a key which holds from `step` on."""
    return max(step, steps_of(settings, key).start)


def refusal(state: State, asked: dict[str, Scalar]) -> str:
    """Why no step would go by these values; empty if each key has some that will.

    Args:
        state: The run's; not changed.
        asked: Values by key.
    """
    if state.is_stopping:
        return "the run is stopping: no further step will be ordered that could go by this"
    following, settings = changes.next_step(state), state.settings
    if following > settings.last_step:
        return f"the run's last step, {settings.last_step}, is ordered or done: nothing is left that could go by this"
    over = {key: steps_of(settings, key)[-1] for key in asked if steps_of(settings, key)[-1] < following}
    return "\n".join(f"{key}: the last step that goes by it, {last}, is ordered or done" for key, last in over.items())


def settable(state: State) -> Settable:
    """What can be set in a run, for who asks."""
    settings = state.settings
    step = changes.next_step(state)
    return Settable(
        step=step,
        keys=settings.dynamic,
        fixed=settings.fixed,
        values=changes.values_at(state, step),
        since={change.key: first_step(settings, change.key, change.step) for change in state.changes},
    )
