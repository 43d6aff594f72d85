"""A run that never ends and in which nothing is ever too old."""

from __future__ import annotations

from control.replica import BATCH

from cosmos_core.control.journal import Journal
from cosmos_core.control.machine import core
from cosmos_core.control.machine.events import ControllerStarted, RunOpened
from cosmos_core.control.machine.settings import Settings, StageSettings
from cosmos_core.control.machine.state import State


def settings(num_replicas: int, group_size: int) -> Settings:
    """Of one policy replica and so many rollout replicas."""
    prompts = max(256, num_replicas * BATCH // 2)
    stage = StageSettings(source="rollouts", first_version=0, steps=10**6, prompts_per_step=prompts, min_group_size=1)
    return Settings(
        run_id="run",
        run_seed=5,
        num_rows=10**5,
        stages=(stage,),
        policy_replicas=1,
        rollout_replicas=num_replicas,
        rollout_group_size=group_size,
        capacity=2 * BATCH,
        sync_max_staleness=10**5,
        synchronous=False,
        sync_interval=1,
        evaluation_prompts=0,
        evaluation_interval=0,
        policy_checkpoint_interval=0,
        rewards=("right",),
    )


def opened(journal: Journal, chosen: Settings) -> State:
    """The state of a run that has just been opened, in its first term."""
    opening, started = RunOpened(settings=chosen), ControllerStarted(term=1)
    state = core.begin(opening)
    core.step(state, started)
    journal.append(opening)
    journal.append(started)
    journal.commit()
    return state
