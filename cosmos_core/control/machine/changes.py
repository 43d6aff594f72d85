"""Dynamic keys of a run: what was asked for, from which step on it holds, and what holds at a step.

A change takes effect at one boundary for all: with the next step that has not been ordered. Every order and every
lease carries the values that hold for it, so that who comes later, or repeats a step, uses the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Final

import attrs

from cosmos_core.config.checks import pace_problem
from cosmos_core.config.dynamic import chosen
from cosmos_core.control.machine.records import SettingChange
from cosmos_core.control.machine.settings import Settings
from cosmos_core.control.machine.state import State
from cosmos_core.errors import ConfigError
from cosmos_core.transport.messages import Set, Settable
from cosmos_core.types import Scalar

_PACE: Final = ("sync.max_staleness", "sync.interval")
_WARMUP: Final = "warmup."
_WHOLE_RUN: Final = "policy.checkpoint."
"""Beginnings of keys; all others are of the main stage."""


def take(state: State, request: Set) -> None:
    """Note a change from the next step on that has not been ordered; what is refused changes nothing."""
    try:
        asked = asked_of(state, request)
    except ConfigError:
        return
    step = next_step(state)
    before = values_at(state, step)
    recipe = {each.key: each.value for each in state.settings.dynamic}
    for key, value in asked.items():
        if (previous := before.get(key, recipe[key])) != value:
            state.changes.append(SettingChange(step=step, key=key, before=previous, after=value))


def next_step(state: State) -> int:
    """The first step that has not been ordered."""
    return state.step + (2 if state.attempts else 1)


def values_at(state: State, step: int) -> dict[str, Scalar]:
    """The values of dynamic keys at a step, of those that are not as in the recipe."""
    recipe = {each.key: each.value for each in state.settings.dynamic}
    values = {change.key: change.after for change in state.changes if change.step <= step}
    return {key: value for key, value in values.items() if value != recipe.get(key)}


def settle(state: State) -> bool:
    """Let the controller go by the values of the next step; whether anything that it goes by has changed."""
    settings = _settled(state)
    if settings == state.settings:
        return False
    has_pace_changed = settings.sync_from != state.settings.sync_from
    state.settings = settings
    if has_pace_changed and state.stage.uses_rollouts:
        # Otherwise the newest version that replicas have could lag more than is now allowed, with none to come.
        state.publish = max(state.publish, state.step)
        state.touch("policy")
    return True


def drawn(leased: Iterable[Mapping[str, Scalar]]) -> dict[str, int]:
    """The number of groups that were drawn with a sampling other than the recipe's, by that sampling."""
    found: Counter[str] = Counter()
    for settings in leased:
        found.update(f"{key}={value}" for key, value in settings.items() if key.startswith("rollout.sampling."))
    return dict(sorted(found.items()))


def keep(changes: list[SettingChange], step: int, before: Settings, after: Settings) -> list[SettingChange]:
    """The changes that a run which goes on from a step keeps: those in force at its next step.

    A key whose value in the recipe was changed for going on (`before` -> `after`) is as the recipe says.
    """
    recipes = [{each.key: each.value for each in settings.dynamic} for settings in (before, after)]
    same = {key for key, value in recipes[1].items() if key in recipes[0] and recipes[0][key] == value}
    return [change for change in changes if change.step <= step + 1 and change.key in same]


def tell_undone(state: State, kept: list[SettingChange], step: int) -> None:
    """Say which changes did not happen in a run that goes on from a step."""
    undone = [change for change in state.changes if change not in kept]
    if undone:
        what = ", ".join(f"{change.key} = {change.after} from step {change.step} on" for change in undone)
        state.status_details["settings"] = f"going on from step {step} undid {what}"


def asked_of(state: State, request: Set) -> dict[str, Scalar]:
    """The values that a request asks for, by key."""
    settings = state.settings
    asked = chosen(settings.dynamic, settings.fixed, request.overrides)
    values = {each.key: each.value for each in settings.dynamic} | values_at(state, next_step(state)) | asked
    if any(key in asked for key in _PACE):
        interval, bound = values["sync.interval"], values["sync.max_staleness"]
        assert isinstance(interval, int)
        assert isinstance(bound, int)
        if problem := pace_problem(interval, bound):
            raise ConfigError(problem)
    return asked


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
    """Say why no step would go by these values; empty if each key has some that will."""
    if state.is_stopping:
        return "the run is stopping: no further step will be ordered that could go by this"
    following, settings = next_step(state), state.settings
    if following > settings.last_step:
        return f"the run's last step, {settings.last_step}, is ordered or done: nothing is left that could go by this"
    over = {key: steps_of(settings, key)[-1] for key in asked if steps_of(settings, key)[-1] < following}
    return "\n".join(f"{key}: the last step that goes by it, {last}, is ordered or done" for key, last in over.items())


def settable(state: State) -> Settable:
    """The keys that can be set in a run, for whoever asks."""
    settings = state.settings
    step = next_step(state)
    return Settable(
        step=step,
        keys=settings.dynamic,
        fixed=settings.fixed,
        values=values_at(state, step),
        since={change.key: first_step(settings, change.key, change.step) for change in state.changes},
    )


def _settled(state: State) -> Settings:
    values = {each.key: each.value for each in state.settings.dynamic} | values_at(state, state.step + 1)
    # Its own settings have the names of the recipe's keys.
    own = attrs.fields_dict(Settings)
    held: dict[str, Any] = {name: value for key, value in values.items() if (name := key.replace(".", "_")) in own}
    paced = [change.step - 1 for change in state.changes if change.key in _PACE and change.step <= state.step + 1]
    first_version = state.settings.main.first_version
    return attrs.evolve(state.settings, **held, sync_from=max(0, max(paced, default=0) - first_version))
