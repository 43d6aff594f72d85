"""Bugs that are planted are found: oracles that no bug sets off prove nothing.

`python -m tests.simulation` searches for the seeds, and does the same with bugs that are made by rule.
"""

from __future__ import annotations

import json
import re
from collections import Counter

import pytest

from .__main__ import SEEDS, main
from .mutants import MODULES, drawn, mutants
from .plants import PLANTS
from .plants.planting import plant, planted
from .searching import search

LEAST = 0.9
"""Of planted bugs, those that must be found."""


def test_nine_of_ten_planted_bugs_show_with_the_seeds_that_are_kept():
    seeds = json.loads(SEEDS.read_text(encoding="utf-8"))
    findings = {bug.name: search(planted(bug), [seeds[bug.name]]) for bug in PLANTS if bug.name in seeds}
    missed = [name for name, finding in findings.items() if finding is None]
    unknown = [bug.name for bug in PLANTS if bug.name not in seeds]
    told = "\n".join([*(f"  {name}" for name in missed), *(f"  {name} (no seed is known)" for name in unknown)])
    print(f"{len(findings) - len(missed)} of {len(PLANTS)} planted bugs are found; these are not:\n{told}")
    oracles = {finding.oracle for finding in findings.values() if finding is not None}
    assert len(oracles) > 8, f"few oracles tell of anything: {oracles}"
    num_missed = len(missed) + len(unknown)
    assert num_missed <= (1 - LEAST) * len(PLANTS), f"missed; search again (--known --write):\n{told}"


def test_every_plant_has_its_own_name_and_every_seed_is_a_plants():
    names = [bug.name for bug in PLANTS]
    assert len(set(names)) == len(names) >= 30
    assert json.loads(SEEDS.read_text(encoding="utf-8")).keys() <= set(names)


def test_a_plant_that_no_longer_fits_is_an_error():
    with pytest.raises(AssertionError, match="plant it elsewhere"), planted(plant("", (f"{__name__}:helper", "9", ""))):
        pass


def helper() -> int:
    return 8


def test_mutants_are_of_every_kind_and_each_module_has_some():
    every = drawn(300, draw=0)
    words = Counter(re.match(r"negated|removed", mutant.change) is not None for mutant in every)
    assert min(words.values()) > 50
    modules = {mutant.function.partition(":")[0] for mutant in every}
    assert len(modules) > len(MODULES) - 3
    assert [mutant.name for mutant in drawn(9, draw=3)] == [mutant.name for mutant in drawn(9, draw=3)]


def test_a_mutant_is_in_the_program_for_a_while():
    from cosmos_core.control.machine import batch_assembly

    before = batch_assembly.balanced
    (mutant, *_) = mutants("cosmos_core.control.machine.batch_assembly:balanced")
    with mutant.planted():
        assert batch_assembly.balanced is not before
    assert batch_assembly.balanced is before


@pytest.mark.sweep
@pytest.mark.timeout(3600)
def test_most_bugs_are_found_from_seeds_that_nobody_chose(capsys):
    """Run with `-m sweep -s`."""
    main(["plants", "--seeds", "1000:1200"])
    found, number = map(int, re.search(r"found (\d+) of (\d+) in", capsys.readouterr().out).groups())
    assert found >= LEAST * number


@pytest.mark.sweep
@pytest.mark.timeout(3600)
def test_most_bugs_made_by_rule_are_found(capsys):
    """Some of those that are not change nothing that anybody could see."""
    main(["mutants"])
    found, number = map(int, re.search(r"found (\d+) of (\d+) in", capsys.readouterr().out).groups())
    assert found >= 0.6 * number
