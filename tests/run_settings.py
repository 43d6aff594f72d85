"""Settings of small runs, for tests and simulations of the controller."""

from __future__ import annotations

import attrs

from cosmos_core.control.machine.settings import Settings, StageSettings


def rollouts(first: int, steps: int, prompts: int, *, min_group_size: int = 2) -> StageSettings:
    """A stage that trains on what is generated, `prompts` groups a step, after step `first`."""
    return _stage("rollouts", first, steps, prompts, min_group_size)


def demonstrations(first: int, steps: int, prompts: int) -> StageSettings:
    """A stage that trains on demonstrations, `prompts` a step, after step `first`."""
    return _stage("demonstrations", first, steps, prompts, 1)


def small_settings(*stages: StageSettings, **changes: object) -> Settings:
    """A run of these stages: one replica of each role, groups of 4 samples, a new version with each step.

    Args:
        stages: In order.
        changes: Fields of `Settings` that shall be otherwise.
    """
    settings = Settings(
        run_id="run",
        run_seed=5,
        num_rows=11,
        stages=stages,
        policy_replicas=1,
        rollout_replicas=1,
        rollout_group_size=4,
        capacity=3,
        sync_max_staleness=1,
        synchronous=False,
        sync_interval=1,
        evaluation_prompts=0,
        evaluation_interval=0,
        policy_checkpoint_interval=0,
        rewards=("right",),
        waits_for_oldest=True,
    )
    return attrs.evolve(settings, **changes)  # type: ignore[arg-type]


def _stage(source: str, first: int, steps: int, prompts: int, min_group_size: int) -> StageSettings:
    return StageSettings(
        source=source, first_version=first, steps=steps, prompts_per_step=prompts, min_group_size=min_group_size
    )
