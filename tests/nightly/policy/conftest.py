"""The tiny models and algorithms of the unit tests of the policy."""

from tests.unit.policy.conftest import config, kit, model
from tests.unit.policy.processes.conftest import store

__all__ = ["config", "kit", "model", "store"]
