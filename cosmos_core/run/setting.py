"""`cosmos set`: check a change with the run's own plugins, ask for it, and say from which step on it holds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import attrs

from cosmos_core.config.dynamic import chosen
from cosmos_core.config.job import Job
from cosmos_core.config.loading import load_job, recipe_with
from cosmos_core.config.stages import stages
from cosmos_core.controller.machine.changes import next_step, values_at
from cosmos_core.controller.machine.records import SettingChange
from cosmos_core.controller.machine.state import State
from cosmos_core.errors import ReplicaError
from cosmos_core.plugin.roles import load_algorithm, selections
from cosmos_core.plugin.selection import PluginSet
from cosmos_core.run.asking import address_of, ask
from cosmos_core.run.follow import Follower
from cosmos_core.run.observer import so_far
from cosmos_core.transport.keys import person_key
from cosmos_core.transport.requests import Set


def change_settings(directory: Path, overrides: Sequence[str]) -> tuple[SettingChange, ...]:
    """Change dynamic keys of a run that goes on.

    Args:
        directory: The run's folder.
        overrides: `KEY=VALUE`.

    Returns:
        What changed, and the first step at which it holds; nothing where the values were these already.

    Raises:
        ConfigError: A key is no dynamic one, or a value is refused, by its bounds or by the algorithm.
        ReplicaError: The run does not go on, does not answer, or refuses.
        CosmosError: It is no run.
    """
    job, follower = load_job(directory), Follower()
    address, key = address_of(directory, job), person_key(job.keys)
    follower.fold(so_far(address, job.run_id, key))
    if follower.state is None:
        raise ReplicaError(f"{directory}: the run has not begun yet; try again in a moment")
    _check(job, follower.state, overrides)
    known = list(follower.state.changes)
    ask(directory, Set(overrides=tuple(overrides)))
    # What was taken in is in the journal.
    follower.fold(so_far(address, job.run_id, key, after=follower.last_sequence))
    return tuple(change for change in follower.state.changes if change not in known)


def _check(job: Job, state: State, overrides: Sequence[str]) -> None:
    """Refuse what only the plugins can see: options that contradict one another, or the run they are in."""
    settings = state.settings
    values = values_at(state, next_step(state)) | chosen(settings.dynamic, settings.fixed, overrides)
    recipe = recipe_with(job.recipe, values)
    changed = attrs.evolve(job, recipe=recipe)
    plugins = PluginSet.load(selections(recipe, ["algorithm"]))
    for stage in stages(recipe):
        load_algorithm(changed, plugins, stage)
