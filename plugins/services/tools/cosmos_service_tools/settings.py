"""`cosmos set`: checks a change with the run's own plugins, requests it, and tells from which step on it holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import attrs

from cosmos_core.config.dynamic import chosen
from cosmos_core.config.job import Job, stages
from cosmos_core.config.loading import load_job, recipe_with
from cosmos_core.config.schema import Recipe
from cosmos_core.config.structure import fields
from cosmos_core.errors import ConfigError, ReplicaError
from cosmos_core.plugins.recipe import load_algorithm, load_model, selections, unmet
from cosmos_core.plugins.selection import PluginSet
from cosmos_core.run.planning.preflight import engine_preflight
from cosmos_core.run.requests import controller_client
from cosmos_core.transport.messages import Set, Settable
from cosmos_core.types import Scalar

_SAMPLING: Final = "rollout.sampling."


@attrs.frozen(kw_only=True)
class Changed:
    """A key that has another value now.

    Attributes:
        step: The first step that goes by it.
        waits: Whether that is the first one of a stage that has not begun.
    """

    key: str
    before: Scalar
    after: Scalar
    step: int
    waits: bool


def change_settings(directory: Path, overrides: Sequence[str]) -> tuple[Changed, ...]:
    """Change dynamic keys of a run that goes on; what changed, nothing where the values were these already.

    Its controller is asked what holds now, however long the run is.
    """
    job = load_job(directory)
    with controller_client(directory, job) as controller:
        before = controller.settable()
        asked = _checked(job, before, overrides)
        if refusal := controller.ask(Set(overrides=tuple(overrides))):
            raise ReplicaError(f"{directory}: refused: {refusal}")
        after = controller.settable()
    held, holds = _values(before), _values(after)
    return tuple(
        Changed(key=key, before=held[key], after=holds[key], step=step, waits=step > after.step)
        for key in asked
        if holds[key] != held[key]
        for step in (after.since[key],)
    )


def _values(known: Settable) -> dict[str, Scalar]:
    """The value of each dynamic key at the next step."""
    return {each.key: each.value for each in known.keys} | known.values


def _checked(job: Job, known: Settable, overrides: Sequence[str]) -> dict[str, Scalar]:
    """The values to set; refuses what only plugins can see: options that contradict one another, or the run."""
    plugins = PluginSet.load(selections(job.recipe, ["algorithm"]))
    asked = chosen(known.keys, known.fixed | _static_options(job, plugins, known), overrides)
    recipe = recipe_with(job.recipe, known.values | asked)
    changed = attrs.evolve(job, recipe=recipe)
    for stage in stages(recipe):
        if lacking := [*unmet(recipe, stage, load_algorithm(changed, plugins, stage))]:
            raise ConfigError("\n".join(lacking))
    if objections := [*_objections(job, recipe, asked)]:
        raise ConfigError("\n".join(objections))
    return asked


def _objections(job: Job, recipe: Recipe, asked: Mapping[str, Scalar]) -> Iterator[str]:
    """Problems of the engine with changed sampling: it would refuse the first request, which ends its replica."""
    if not job.uses_rollouts or not any(key.startswith(_SAMPLING) for key in asked):
        return
    plugins = PluginSet.load(selections(recipe, ["model", "algorithm", "engine", "launcher"]))
    if plugins.provider("engine", recipe.rollout.engine.plugin).preflight is None:
        return
    model = load_model(job, plugins)
    facts = model.facts()
    told = [engine_preflight(each, plugins, model, facts, shows_media=False).problems for each in (job.recipe, recipe)]
    # What it says of the run as it is may be of this machine, which need not be that of its replicas.
    yield from (problem for problem in told[1] if problem not in told[0])


def _static_options(job: Job, plugins: PluginSet, known: Settable) -> dict[str, str]:
    """Options of the run's algorithms that are not dynamic, and why they cannot change."""
    dynamic = {each.key for each in known.keys}
    return {
        key: f"{stage.plugin} takes it once, when its stage begins; it is not marked dynamic"
        for stage in stages(job.recipe)
        for name, _ in fields(plugins.provider("algorithm", stage.plugin).options)
        if (key := f"{stage.key}.options.{name}") not in dynamic
    }
