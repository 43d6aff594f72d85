"""The runs that are simulated: small, and of every kind that a recipe can ask for."""

from __future__ import annotations

import random
from typing import Final

import attrs

from cosmos_core.config.dynamic import DynamicKey
from cosmos_core.config.schema import ControlConfig
from cosmos_core.control.machine.settings import Settings
from tests.run_settings import demonstrations, rollouts, small_settings

_IN_TURNS: Final = 0.25
"""Chance that the pools share GPUs."""
_STRICT: Final = 0.3
"""Chance that a group with one unscored sample cannot be trained on."""


@attrs.frozen(kw_only=True)
class Scenario:
    """A run.

    Attributes:
        settings: Its constants.
        control: Intervals and time limits.
    """

    settings: Settings
    control: ControlConfig

    @classmethod
    def drawn(cls, seed: int, *, learns_from: str = "", **changes: object) -> Scenario:
        """The run of a seed: by rollouts mostly, else from demonstrations.

        Args:
            seed: Decides alone.
            learns_from: `rollouts` or `demonstrations`; empty leaves it to the seed.
            changes: Settings that are not left to the seed.
        """
        rng = random.Random(f"scenario of {seed}")
        source = rng.choice(("rollouts", "rollouts", "rollouts", "demonstrations"))
        make = _imitating if (learns_from or source) == "demonstrations" else _rolling_out
        settings = attrs.evolve(make(rng), **changes)  # type: ignore[arg-type]
        control = ControlConfig(
            heartbeat_s=0.25, lost_after_s=rng.choice((1.2, 2.0, 3.0)), join_timeout_s=60.0, progress_timeout_s=4.0
        )
        if settings.main.uses_rollouts and rng.random() < _STRICT:
            whole = attrs.evolve(settings.main, min_group_size=settings.rollout_group_size)
            settings = attrs.evolve(settings, stages=(*settings.stages[:-1], whole))
        # Drawn apart, so that the others of a seed stay as they are.
        if settings.rollout_replicas and "takes_turns" not in changes:
            turns = random.Random(f"turns of {seed}").random() < _IN_TURNS
            settings = attrs.evolve(settings, takes_turns=turns)
        return cls(settings=attrs.evolve(settings, dynamic=_dynamic(settings)), control=control)


def _rolling_out(rng: random.Random) -> Settings:
    synchronous = rng.random() < 0.3
    interval = 1 if synchronous else rng.choice((1, 1, 2))
    warmup = rng.choice((0, 0, 2))
    stages = [rollouts(warmup, rng.choice((4, 6, 10)), rng.choice((2, 4)))]
    if warmup:
        stages.insert(0, demonstrations(0, warmup, 3))
    return small_settings(
        *stages,
        policy_replicas=rng.choice((1, 2, 2, 3)),
        rollout_replicas=rng.choice((1, 2, 3, 6, 9)),
        synchronous=synchronous,
        sync_interval=interval,
        sync_max_staleness=0 if synchronous else rng.choice((interval - 1, 1, 3)),
        evaluation_prompts=rng.choice((0, 5)),
        evaluation_interval=rng.choice((0, 2, 3)),
        policy_checkpoint_interval=rng.choice((0, 1, 2)),
        sync_fan_out=rng.choice((1, 1, 2, 8)),
        shares_memory=rng.random() < 0.3,
    )


def _imitating(rng: random.Random) -> Settings:
    scores = rng.random() < 0.5
    return small_settings(
        demonstrations(0, rng.choice((5, 6, 9)), rng.choice((2, 4))),
        sync_max_staleness=0,
        policy_replicas=rng.choice((1, 2, 3)),
        rollout_replicas=rng.choice((1, 2)) if scores else 0,
        rewards=("right",) if scores else (),
        evaluation_prompts=4 if scores else 0,
        heldout_rows=rng.choice((1, 3, 7)),
        evaluation_interval=rng.choice((0, 1, 2, 3)),
        policy_checkpoint_interval=rng.choice((0, 1, 2)),
    )


def _dynamic(settings: Settings) -> tuple[DynamicKey, ...]:
    """What people may set: of what the controller goes by, and of what only replicas do."""
    rate = DynamicKey(key="policy.optimizer.lr", type="number", value=1.0, above=0.0)
    saving = DynamicKey(
        key="policy.checkpoint.interval", type="integer", value=settings.policy_checkpoint_interval, at_least=0
    )
    interval = DynamicKey(key="sync.interval", type="integer", value=settings.sync_interval, at_least=1)
    bound = DynamicKey(key="sync.max_staleness", type="integer", value=settings.sync_max_staleness, at_least=0)
    paced = () if settings.synchronous or not settings.main.uses_rollouts else (interval, bound)
    return (rate, saving, *paced)
