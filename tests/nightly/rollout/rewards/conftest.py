"""The fixtures of the unit tests of rewards."""

from tests.unit.rollout.rewards.conftest import plugin, scorer

__all__ = ["plugin", "scorer"]
