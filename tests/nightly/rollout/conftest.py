"""The fixtures of the unit tests of rollout."""

from tests.unit.rollout.conftest import *  # noqa: F403
