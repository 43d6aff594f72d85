"""Arithmetic of mesh sizes, as the configuration checks it."""

from cosmos_core.config.mesh import check_sizes, data_ranks, expert_shards, world_size

__all__ = ["check_sizes", "data_ranks", "expert_shards", "world_size"]
