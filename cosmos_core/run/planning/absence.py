"""What the rewards of a recipe say that this machine lacks (`Requiring`), before any process starts."""

from __future__ import annotations

from collections.abc import Sequence

from cosmos_core.config.schema import Recipe
from cosmos_core.errors import PluginBrokenError
from cosmos_core.plugin.selection import PluginSet
from cosmos_core.protocols import Requiring, Reward
from cosmos_core.run.launch.making import capabilities_of


def absent_of_rewards(recipe: Recipe, plugins: PluginSet, rewards: Sequence[Reward]) -> tuple[str, ...]:
    """Ask the rewards; none where the launcher submits, since what those machines have is not known here.

    Args:
        recipe: The recipe.
        plugins: Its plugins.
        rewards: Its rewards, in its order.

    Raises:
        PluginError: A reward failed, or answered with something else.
    """
    if capabilities_of(recipe, plugins).submits:
        return ()
    found: list[str] = []
    for config, reward in zip(recipe.reward, rewards, strict=True):
        if not isinstance(reward, Requiring):
            continue
        where = f"reward plugin {config.plugin!r}"
        try:
            told: object = reward.absent()
        except Exception as error:
            raise PluginBrokenError(f"{where}: absent() failed: {type(error).__name__}: {error}") from error
        if not isinstance(told, str):
            raise PluginBrokenError(f"{where}: absent() returned {told!r:.100}, which is no str")
        if told:
            found.append(f"reward {config.label}: {told}")
    return tuple(found)
