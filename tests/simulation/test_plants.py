"""Bugs that are planted are found: oracles that no bug sets off prove nothing."""

from __future__ import annotations

import pytest

from cosmos_core.testing.simulation import Simulation, Violation

from .plants import HIDDEN, PLANTS, RARE, planted


def found(plant, seeds):
    """The first seed that shows a bug, and the oracle that tells of it; None if there is none."""
    with planted(plant):
        for seed in seeds:
            try:
                Simulation(seed).run()
            except Violation as violation:
                return seed, violation.oracle
    return None


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.name.replace(" ", "-"))
def test_a_planted_bug_is_found(plant):
    assert found(plant, range(100))


def test_a_fence_behind_a_fence_is_not_missed():
    assert found(HIDDEN, range(5)) is None


@pytest.mark.sweep
@pytest.mark.parametrize("plant", [*PLANTS, *RARE], ids=lambda plant: plant.name.replace(" ", "-"))
def test_which_seeds_find_a_planted_bug(plant):
    """Run with `-m sweep -s`: how often each bug shows, and the first seed of each oracle, for `PLANTS` to name."""
    first: dict[str, int] = {}
    num_found = 0
    with planted(plant):
        for seed in range(200):
            try:
                Simulation(seed).run()
            except Violation as violation:
                num_found += 1
                first.setdefault(violation.oracle, seed)
    print(f"{plant.name}: found by {num_found} of 200 seeds, first by {first}")
    assert num_found or plant in RARE
