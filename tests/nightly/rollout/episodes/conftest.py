"""The fixtures of the unit tests of environments."""

from tests.unit.rollout.episodes.conftest import player, plugin

__all__ = ["player", "plugin"]
