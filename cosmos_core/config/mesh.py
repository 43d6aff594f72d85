"""Arithmetic of mesh sizes: how many processes, and what does not divide."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

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


def divisors(number: int) -> list[int]:
    """Everything that divides a positive number, ascending."""
    small = [each for each in range(1, math.isqrt(number) + 1) if number % each == 0]
    return small + [number // each for each in reversed(small) if each * each != number]


def choices(numbers: Iterable[int]) -> str:
    """Numbers for a message, such as `1, 2 or 4`."""
    words = [str(number) for number in numbers]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def mesh_problems(sizes: MeshConfig) -> Iterator[str]:
    """Reasons why the axes do not fit together, each with the number that does not fit and what would."""
    shared = sizes.dp_shard * sizes.cp * sizes.tp
    if sizes.ep == 1:
        return
    fitting = [each for each in divisors(shared) if each == 1 or each % sizes.tp == 0]
    if shared % sizes.ep:
        yield (
            f"policy.mesh.ep: {sizes.ep} does not divide dp_shard · cp · tp = {shared}, over which experts are spread; "
            f"ep can be {choices(fitting)}"
        )
    elif sizes.ep % sizes.tp:
        yield (
            f"policy.mesh.ep: {sizes.ep} is not a multiple of tp = {sizes.tp}; experts are whole on each process, so "
            f"the processes of one tp group hold different ones; ep can be {choices(fitting)}"
        )


def check_sizes(sizes: MeshConfig, processes: int | None = None) -> None:
    """Check that the axes fit together, and the number of processes if given."""
    for problem in mesh_problems(sizes):
        raise ConfigError(problem)
    if processes is not None and processes != world_size(sizes):
        raise ConfigError(
            f"policy.mesh: pp · dp_replicate · dp_shard · cp · tp = {world_size(sizes)} processes, "
            f"and the replica has {processes}; change the sizes so that their product is {processes}"
        )
