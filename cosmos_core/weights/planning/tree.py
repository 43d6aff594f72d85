"""Who reads from whom when many want a version: replicas that have it pass it on, each to a bounded number.

The depth is the least that the bound allows, as each level costs the time of a transfer. Within it the first replica of
each host reads at the shallowest level, from the nearest there that has a place left, and every other from the nearest
of all: the first of its host, where that has a place left.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

import numpy as np

from cosmos_core.errors import WeightSyncError
from cosmos_core.weights.planning.topology import Place, distances

ORIGIN: Final = -1
"""Stands for those who have the version to begin with."""


def parents(replicas: Sequence[Place], origin: Place, fan_out: int) -> list[int]:
    """The replica from which each one reads, or `ORIGIN`.

    Args:
        replicas: Where they run.
        origin: Where those run who have the version.
        fan_out: Most readers of one replica, and of the origin.

    Raises:
        WeightSyncError: `fan_out` is less than 1.
    """
    if fan_out < 1:
        raise WeightSyncError(f"a fan-out of {fan_out}: somebody must be allowed to read; give 1 or more")
    number = len(replicas)
    # The origin is the last, so that its number is ORIGIN as an index, too.
    far = distances([*replicas, origin], replicas)
    depths, readers = np.full(number + 1, number + 1), np.zeros(number + 1, np.int64)
    depths[ORIGIN] = 0
    deepest = least_depth(number, fan_out)
    found = [ORIGIN] * number
    for replica, is_first in _order(replicas):
        free = np.flatnonzero((depths < deepest) & (readers < fan_out))
        keys = (depths[free], far[free, replica]) if is_first else (far[free, replica], depths[free])
        parent = int(free[np.lexsort((free, readers[free], *reversed(keys)))[0]])
        readers[parent] += 1
        depths[replica] = depths[parent] + 1
        found[replica] = parent if parent < number else ORIGIN
    return found


def least_depth(number: int, fan_out: int) -> int:
    """Levels that `number` replicas need below the origin."""
    depth, level, room = 0, 1, 0
    while room < number:
        depth, level = depth + 1, level * fan_out
        room += level
    return depth


def _order(replicas: Sequence[Place]) -> list[tuple[int, bool]]:
    """The replicas, and which is the first of its host: these first, racks taking turns; then the second of each."""
    hosts: dict[tuple[str, str], int] = {}
    hosts_of_rack: Counter[str] = Counter()
    on_host: Counter[tuple[str, str]] = Counter()
    keys = []
    for index, place in enumerate(replicas):
        # Of what is not known nothing is shared.
        host = (place.rack, place.host or f"{index} alone")
        if host not in hosts:
            hosts[host] = hosts_of_rack[place.rack]
            hosts_of_rack[place.rack] += 1
        keys.append((on_host[host], hosts[host], index))
        on_host[host] += 1
    return [(index, turn == 0) for turn, _, index in sorted(keys)]
