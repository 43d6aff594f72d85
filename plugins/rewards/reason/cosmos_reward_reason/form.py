"""The entry point `reason-format`."""

from __future__ import annotations

from cosmos_core.protocols import (
    Completion,
    NoOptions,
    Provider,
    Reward,
    RewardCapabilities,
    RewardContext,
    Score,
    hookimpl,
)
from cosmos_reward_reason.tags import read_tags


class FormatReward:
    """1 for a thought and an answer in tags, and nothing else; 0 for anything else."""

    def __init__(self, options: NoOptions, context: RewardContext) -> None:
        """There is nothing to choose."""

    def score(self, completion: Completion) -> Score:
        """Score one completion."""
        return Score(value=float(read_tags(completion.own).is_well_formed))


@hookimpl
def cosmos_reward() -> Provider[Reward]:
    """Provide the reward for the format."""
    capabilities = RewardCapabilities(payload_kinds=frozenset({"tokens"}), deterministic=True)
    return Provider(create=FormatReward, options=NoOptions, capabilities=capabilities)
