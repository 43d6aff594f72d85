"""Building blocks of rollout engines: requests, sequences, commands between two steps, weights in place."""

from cosmos_core.replica.lifetime import die_with_parent

__all__ = ["die_with_parent"]
