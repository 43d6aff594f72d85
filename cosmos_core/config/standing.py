"""Why a key of the recipe stays as it is while a run goes on, and which may change when it goes on again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

LAYOUT: Final = ("policy.mesh", "policy.parallel", "policy.micro_batch_units")
"""How a replica spreads its work; whether the model can be spread so is to be asked again."""

TRAVEL: Final = ("sync.transport", "sync.directory", "sync.fan_out", "sync.relay_timeout_s", "sync.delta")
"""How weights reach rollout replicas; whether they can is to be asked again, too."""

CHANGEABLE: Final = (
    "run.steps",
    "evaluation.interval",
    *LAYOUT,
    "policy.checkpoint.interval",
    "policy.checkpoint.keep",
    *TRAVEL,
    "tracking",
    "control",
    "launch",
)
"""Keys, and tables of which every key, that `cosmos run --resume RUN --set KEY=VALUE` may change."""

_OTHERWISE: Final = (
    (("policy.replicas", "rollout.replicas"), "replicas come with `cosmos replica`, and go with `cosmos drain`"),
    (("rollout.sampling.top_p", "rollout.sampling.top_k"), "a run that trains draws from the whole vocabulary"),
    (("policy", "rollout", "sync", "warmup.optimizer"), "replicas are made with it when they start"),
)


def is_in(key: str, tables: Sequence[str]) -> bool:
    """Whether a key is one of some, or in one of some tables."""
    return any(key == table or key.startswith(f"{table}.") for table in tables)


def reason(key: str) -> str:
    """Why a key of the recipe that is not dynamic stays as it is, and what can be done instead."""
    if is_in(key, CHANGEABLE):
        return "processes take it from the recipe when they start; `cosmos run --resume RUN --set KEY=VALUE` changes it"
    for tables, why in _OTHERWISE:
        if is_in(key, tables):
            return why
    return "what a run's weights and samples come from stays as it is"
