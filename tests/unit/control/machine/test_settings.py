from __future__ import annotations

from pathlib import Path

import attrs
import pytest

from cosmos_core.config import Job
from cosmos_core.config.job import StageFacts
from cosmos_core.config.schema import (
    AlgorithmConfig,
    DatasetConfig,
    ModelConfig,
    Recipe,
    RewardConfig,
    RolloutConfig,
    RunConfig,
    SyncConfig,
    WarmupConfig,
)
from cosmos_core.control.machine.events import EVENTS, RunOpened
from cosmos_core.control.machine.settings import StageSettings, settings_of
from cosmos_core.errors import ConfigError
from cosmos_core.protocols.dataset import Window

DEMONSTRATIONS = StageFacts(source="demonstrations")
ROLLOUTS = StageFacts(source="rollouts", min_group_size=2)


@pytest.fixture
def job() -> Job:
    recipe = Recipe(
        run=RunConfig(name="test", steps=10, seed=4),
        model=ModelConfig(),
        algorithm=AlgorithmConfig(plugin="grpo"),
        dataset=DatasetConfig(plugin="arithmetic"),
        reward=(RewardConfig(plugin="math"), RewardConfig(plugin="short")),
        warmup=WarmupConfig(plugin="sft", steps=3, prompts_per_step=5),
        rollout=RolloutConfig(group_size=8, max_in_flight=20),
    )
    return Job(
        run_id="run",
        directory=Path("run"),
        recipe_directory=Path(),
        recipe=recipe,
        num_train_rows=100,
        num_heldout_rows=9,
        num_evaluation_prompts=7,
        uses_rollouts=True,
        stages=(DEMONSTRATIONS, ROLLOUTS),
    )


def test_settings_are_the_numbers_of_the_recipe_and_survive_the_journal(job):
    settings = settings_of(job)
    assert settings.stages == (
        StageSettings(source="demonstrations", first_version=0, steps=3, prompts_per_step=5, min_group_size=1),
        StageSettings(source="rollouts", first_version=3, steps=10, prompts_per_step=16, min_group_size=2),
    )
    assert settings.capacity == 4
    assert settings.rewards == ("math", "short")
    assert (settings.last_step, settings.sync_max_staleness, settings.evaluation_prompts) == (13, 2, 7)
    assert [settings.stage_index(step) for step in (1, 3, 4, 13, 99)] == [0, 0, 1, 1, 1]

    event = RunOpened(settings=settings_of(job))
    assert EVENTS.decode(EVENTS.encode(event)) == event

    job = attrs.evolve(job, recipe=attrs.evolve(job.recipe, sync=SyncConfig(mode="sync", max_staleness=0)))
    settings = settings_of(job)
    assert (settings.synchronous, settings.sync_max_staleness) == (True, 0)


def test_the_policy_measures_what_the_plan_found(job):
    assert settings_of(job).heldout_rows == 0
    imitating = attrs.evolve(job, stages=(DEMONSTRATIONS,) * 2, num_measured_prompts=7)
    settings = settings_of(imitating)
    assert (settings.heldout_rows, settings.evaluation_prompts) == (7, 7)
    alone = attrs.evolve(imitating, recipe=attrs.evolve(job.recipe, reward=()), uses_rollouts=False)
    settings = settings_of(alone)
    assert (settings.heldout_rows, settings.evaluation_prompts) == (7, 0)


def test_a_stage_draws_from_its_windows(job):
    windows = (Window(num_prompts=6, num_rows=3),)
    settings = settings_of(attrs.evolve(job, stages=(attrs.evolve(DEMONSTRATIONS, windows=windows), ROLLOUTS)))
    assert sorted(settings.row_of(position, 0) for position in range(6)) == [0, 0, 1, 1, 2, 2]
    assert sorted(settings.row_of(position, 1) for position in range(100)) == list(range(100))
    opened = RunOpened(settings=settings)
    assert EVENTS.decode(EVENTS.encode(opened)) == opened


def test_a_job_that_does_not_fit_together_is_refused(job, subtests):
    for changes, complaint in [
        ({"stages": (ROLLOUTS,)}, "job.stages: 1 entries for the 2 stages"),
        ({"stages": (ROLLOUTS, ROLLOUTS)}, "warmup.plugin"),
        ({"uses_rollouts": False}, "job.uses_rollouts"),
        ({"num_train_rows": 0}, "0 rows"),
    ]:
        with subtests.test(changes=changes), pytest.raises(ConfigError, match=complaint):
            settings_of(attrs.evolve(job, **changes))


def schedule(settings, what):
    return [number for number in range(settings.last_step + 1) if what(number)]


def test_the_schedules_of_runs_on_rollouts_and_on_demonstrations(settings):
    chosen = settings(
        warmup=2,
        steps=7,
        sync_interval=3,
        evaluation_prompts=5,
        evaluation_interval=4,
        policy_checkpoint_interval=4,
    )
    assert schedule(chosen, chosen.evaluates) == [2, 6, 9]
    assert schedule(chosen, chosen.publishes) == [2, 5, 6, 8, 9]
    assert schedule(chosen, chosen.saves)[1:] == [4, 8, 9]

    stage = StageSettings(source="demonstrations", first_version=0, steps=6, prompts_per_step=2, min_group_size=1)
    chosen = settings(stages=(stage,), evaluation_prompts=5, evaluation_interval=4)
    assert schedule(chosen, chosen.evaluates) == schedule(chosen, chosen.publishes) == [0, 4, 6]
    alone = attrs.evolve(chosen, rollout_replicas=0, evaluation_prompts=0)
    assert schedule(alone, alone.evaluates) == schedule(alone, alone.publishes) == []
    measured = attrs.evolve(alone, heldout_rows=5)
    assert schedule(measured, measured.measures) == [0, 4, 6]
    assert schedule(measured, measured.evaluates) == schedule(measured, measured.publishes) == []
    once = attrs.evolve(chosen, evaluation_interval=0)
    assert schedule(once, once.evaluates) == [0, 6]
