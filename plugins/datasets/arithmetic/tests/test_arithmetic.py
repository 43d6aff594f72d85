"""The problems, the demonstrator and the splits."""

import random
import re
import subprocess
import sys
from pathlib import Path

import attrs
import pytest

from cosmos_core.protocols import DatasetContext
from cosmos_dataset_arithmetic import Arithmetic, ArithmeticOptions, Problem
from cosmos_dataset_arithmetic.problem import careless_demonstration, draw_problem

CONTEXT = DatasetContext(seed=0, directory=Path())
PROBLEM = Problem(start=7, first_operator="+", first_operand=5, second_operator="-", second_operand=4)
SENTENCE = re.compile(
    r"\w+ has (\d+) \w+, (buys|finds|gives away|loses) (\d+)(?: more)?, "
    r"then (buys|finds|gives away|loses) (\d+)(?: more)?\. How many \w+ now\?\n"
)


def parse(text):
    start, first, left, second, right = SENTENCE.fullmatch(text).groups()
    sign = {"buys": "+", "finds": "+", "gives away": "-", "loses": "-"}
    return Problem(
        start=int(start),
        first_operator=sign[first],
        first_operand=int(left),
        second_operator=sign[second],
        second_operand=int(right),
    )


def rows(split, number, **options):
    dataset = Arithmetic(ArithmeticOptions(**options), CONTEXT)
    return [dataset.row(split, index) for index in range(number)]


def test_the_ways_to_work_a_problem_out():
    assert PROBLEM.worked() == "7+5=12\n12-4=8\n#### 8"
    assert PROBLEM.stopped() == "7+5=12\n#### 12"
    assert PROBLEM.mixed_up() == "7+5=12\n12-4=8\n#### 12"


def test_nobody_gives_away_more_than_there_is():
    assert not attrs.evolve(PROBLEM, first_operator="-", first_operand=8).is_possible
    assert not attrs.evolve(PROBLEM, second_operand=13).is_possible
    for row in rows("train", 500):
        assert parse(row.text).is_possible


def test_the_words_say_the_numbers_and_the_reference_is_right():
    for row in rows("train", 500) + rows("heldout", 256):
        assert row.reference == str(parse(row.text).answer)


def test_train_and_heldout_share_no_tuple():
    train = {parse(row.text) for row in rows("train", 20_000)}
    heldout = {parse(row.text) for row in rows("heldout", 5_000, heldout_rows=5_000)}
    assert not train & heldout
    assert len(heldout) / len(train | heldout) == pytest.approx(0.2, abs=0.03)


def test_another_seed_draws_other_rows():
    other = Arithmetic(ArithmeticOptions(), attrs.evolve(CONTEXT, seed=1))
    assert [other.row("train", index).text for index in range(50)] != [row.text for row in rows("train", 50)]


def test_a_row_is_the_same_in_every_release():
    """A known row: another generator, of Python's or of ours, would change it."""
    assert rows("train", 1)[0].text == "Ann has 3 books, buys 9 more, then finds 1. How many books now?\n"


def test_shares_of_the_mistakes():
    rng = random.Random(0)
    counts = {"worked": 0, "stopped": 0, "mixed_up": 0}
    for _ in range(4_000):
        written = careless_demonstration(PROBLEM, rng, careless=0.5, stops=0.75)
        (kind,) = [kind for kind in counts if getattr(PROBLEM, kind)() == written]
        counts[kind] += 1
    assert counts["worked"] / 4_000 == pytest.approx(0.5, abs=0.03)
    assert counts["stopped"] / 4_000 == pytest.approx(0.375, abs=0.03)


def test_problems_that_begin_by_taking_away_are_always_worked():
    problem = attrs.evolve(PROBLEM, first_operator="-")
    rng = random.Random(0)
    written = {careless_demonstration(problem, rng, careless=1.0, stops=0.5) for _ in range(100)}
    assert written == {problem.worked()}


def test_a_careful_demonstrator_is_always_right():
    for row in rows("train", 300, careless=0.0):
        assert row.demonstration.endswith(f"#### {row.reference}")


def test_larger_operands():
    operands = {parse(row.text).start for row in rows("train", 2_000, max_operand=99)}
    assert max(operands) == 99
    assert min(operands) == 1
    rng = random.Random(0)
    assert draw_problem(rng, max_operand=5, heldout=True).is_heldout


def test_sizes_are_those_of_the_options():
    dataset = Arithmetic(ArithmeticOptions(train_rows=3, heldout_rows=0), CONTEXT)
    assert (dataset.size("train"), dataset.size("heldout")) == (3, 0)
    with pytest.raises(IndexError, match="row 3 of split 'train', which has 3"):
        dataset.row("train", 3)


def test_options_out_of_bounds(subtests):
    for bad in [{"careless": 1.1}, {"stops": -0.1}, {"max_operand": 1}, {"train_rows": 0}]:
        with subtests.test(bad=bad), pytest.raises(ValueError):
            ArithmeticOptions(**bad)


@pytest.mark.nightly
def test_importing_it_imports_no_torch():
    code = "import cosmos_dataset_arithmetic.plugin, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
