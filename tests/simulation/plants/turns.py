"""Bugs in the turns of pools that share GPUs."""

from __future__ import annotations

from .planting import plant

MACHINE = "cosmos_core.control.machine"
TURNS = f"{MACHINE}.turns"

PLANTS = (
    plant(
        "a pool wakes before the other one sleeps",
        (f"{TURNS}:may_wake", "holder(state) == role and not state.sleepless", "holder(state) == role"),
    ),
    plant(
        "a replica that is lost is waited for until it sleeps",
        (f"{MACHINE}.membership:lose", "turns.rest(state, replica.name)", "pass"),
    ),
    plant(
        "the policy's turn ends while its gradient group is formed",
        (f"{TURNS}:_has_policy_work", "generation is None or not generation.is_ready or", "generation is None or"),
    ),
)
