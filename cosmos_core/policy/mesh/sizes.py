"""Arithmetic of mesh sizes, without torch: how many processes, and what does not divide."""

from __future__ import annotations

import math

from cosmos_core.config.schema import MeshConfig
from cosmos_core.errors import ConfigError


def world_size(sizes: MeshConfig) -> int:
    """Processes of a replica; `ep` arranges the same ones anew."""
    return math.prod((sizes.pp, sizes.dp_replicate, sizes.dp_shard, sizes.cp, sizes.tp))


def expert_shards(sizes: MeshConfig) -> int:
    """Processes over which each group of experts is sharded."""
    return sizes.dp_shard * sizes.cp * sizes.tp // sizes.ep


def data_ranks(sizes: MeshConfig) -> int:
    """Processes of a replica that train on different sequences."""
    return sizes.dp_replicate * sizes.dp_shard


def check_sizes(sizes: MeshConfig, processes: int | None = None) -> None:
    """Check that the axes fit together, and the number of processes if given.

    Raises:
        ConfigError: They do not; the message names the number that does not fit.
    """
    shared = sizes.dp_shard * sizes.cp * sizes.tp
    if sizes.ep > 1 and shared % sizes.ep:
        raise ConfigError(
            f"policy.mesh.ep: {sizes.ep} does not divide dp_shard · cp · tp = {shared}, over which experts are spread"
        )
    if sizes.ep > 1 and sizes.ep % sizes.tp:
        raise ConfigError(
            f"policy.mesh.ep: {sizes.ep} is not a multiple of tp = {sizes.tp}; experts are whole on each process, so "
            "the processes of one tp group hold different ones"
        )
    if processes is not None and processes != world_size(sizes):
        raise ConfigError(
            f"policy.mesh: pp · dp_replicate · dp_shard · cp · tp = {world_size(sizes)} processes, "
            f"and the replica has {processes}"
        )
