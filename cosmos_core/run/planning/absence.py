"""What the rewards of a recipe say that this machine lacks (`Requiring`), before any process starts."""

from __future__ import annotations

from collections.abc import Sequence

from cosmos_core.config.schema import Recipe
from cosmos_core.plugins.selection import PluginSet
from cosmos_core.protocols import Reward
from cosmos_core.rollout.rewards.absence import absent_here
from cosmos_core.run.launch.making import capabilities_of


def absent_of_rewards(recipe: Recipe, plugins: PluginSet, rewards: Sequence[Reward]) -> tuple[str, ...]:
    """Ask the rewards; none where the launcher submits, since what those machines have is not known here.

    Args:
        recipe: The recipe.
        plugins: Its plugins.
        rewards: Its rewards, in its order.

    Raises:
        CosmosError: As of `absent_here`.
    """
    return () if capabilities_of(recipe, plugins).submits else absent_here(recipe.reward, rewards)
