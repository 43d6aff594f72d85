"""What rewards say that this machine lacks (`Requiring`)."""

from __future__ import annotations

from collections.abc import Sequence

from cosmos_core.config.schema import RewardConfig
from cosmos_core.errors import CosmosError, PluginBrokenError
from cosmos_core.protocols import Requiring, Reward


def absent_here(configs: Sequence[RewardConfig], rewards: Sequence[Reward]) -> tuple[str, ...]:
    """Ask the rewards; of each that lacks something, its name and what, or the option that asks for it.

    Args:
        configs: Of a recipe.
        rewards: What was made of them, in that order.

    Raises:
        CosmosError: What a reward raised of it, or one failed otherwise, or answered with something else.
    """
    found: list[str] = []
    for index, (config, reward) in enumerate(zip(configs, rewards, strict=True)):
        if not isinstance(reward, Requiring):
            continue
        where = f"reward plugin {config.plugin!r}"
        try:
            told: object = reward.absent()
        except CosmosError:
            raise
        except Exception as error:
            raise PluginBrokenError(f"{where}: absent() failed: {type(error).__name__}: {error}") from error
        if not isinstance(told, str):
            raise PluginBrokenError(f"{where}: absent() returned {told!r:.100}, which is no str")
        if told:
            is_of_option = told.partition(":")[0] in config.options
            found.append(f"reward.{index}.options.{told}" if is_of_option else f"reward {config.label}: {told}")
    return tuple(found)
