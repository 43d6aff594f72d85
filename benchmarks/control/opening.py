"""A run that never ends and in which nothing is ever too old."""

from __future__ import annotations

from control.replica import BATCH

from cosmos_core.control.journal import Journal
from cosmos_core.control.machine import core
from cosmos_core.control.machine.events import ControllerStarted, RunOpened
from cosmos_core.control.machine.settings import Settings
from cosmos_core.control.machine.state import State
from cosmos_core.testing.settings import rollouts, small_settings


def settings(num_replicas: int, group_size: int) -> Settings:
    """Of one policy replica and so many rollout replicas."""
    stage = rollouts(0, 10**6, max(256, num_replicas * BATCH // 2), min_group_size=1)
    return small_settings(
        stage,
        num_rows=10**5,
        rollout_replicas=num_replicas,
        rollout_group_size=group_size,
        capacity=2 * BATCH,
        sync_max_staleness=10**5,
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
