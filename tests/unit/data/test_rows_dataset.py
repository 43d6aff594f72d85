"""A dataset of a source and a mapping of one's own."""

from pathlib import Path

import pytest

from cosmos_core.data import BadRowError, LeftOutError, RawRow, RowsDataset, RowsOptions
from cosmos_core.errors import DataError
from cosmos_core.types import Prompt


class Numbers:
    """Numbers up to a limit."""

    name, folder = "numbers", Path()

    def __init__(self, limit):
        self.limit, self.scans = limit, 0

    def scan(self):
        self.scans += 1
        return (RawRow(locator=number, line=number + 1, row=number) for number in range(self.limit))

    def places(self):
        return iter(range(self.limit))

    def read(self, locator):
        return locator


class Odd:
    """Takes odd numbers, leaves even ones out, and finds fault with 7."""

    def prompt(self, row, folder):
        if row == 7:
            raise BadRowError("it is 7", "sevens")
        if row % 2 == 0:
            raise LeftOutError(f"{row} is even", "even")
        return Prompt(text=str(row))


def make(limit=6, heldout=None, **options):
    held = None if heldout is None else [Numbers(heldout)]
    return RowsDataset("odd", RowsOptions(**options), Odd(), [Numbers(limit)], held)


def test_rows_are_left_out_refused_or_skipped():
    # What a filter leaves out is counted and never refused.
    dataset = make()
    assert [dataset.row("train", index).text for index in range(dataset.size("train"))] == ["1", "3", "5"]
    assert [(each.reason, each.num_rows, each.first) for each in dataset.omitted("train")] == [
        ("even", 3, "numbers:1: 0 is even")
    ]

    # What is bad is refused unless it may be skipped.
    with pytest.raises(DataError, match="numbers:8: it is 7"):
        make(9)
    assert [each.reason for each in make(9, on_bad_row="skip").omitted("train")] == ["even", "sevens"]

    # A split of its own and rows held out.
    assert (make(heldout=4).size("heldout"), make(20, heldout_rows=2, on_bad_row="skip").size("heldout")) == (2, 2)


def test_a_refusal_says_what_to_do():
    # Remedies name the options where they are.
    sources, there = [Numbers(9)], "dataset.options.parts.0.options"
    with pytest.raises(DataError, match=rf"or set {there}\.on_bad_row = 'skip'"):
        RowsDataset("odd", RowsOptions(), Odd(), sources, None, key_path=there)
    options = RowsOptions(on_bad_row="skip", heldout_rows=9)
    with pytest.raises(DataError, match=rf"^{there}: cannot hold 9 rows out of 3"):
        RowsDataset("odd", options, Odd(), sources, None, key_path=there)

    # Nothing usable says why.
    with pytest.raises(DataError, match=r"^numbers: empty; give a source that has rows$"):
        make(0)
    with pytest.raises(DataError, match=r"numbers: no usable rows \(1 skipped: 1 x even\)"):
        make(1)


def test_rows_checked_when_read_are_not_scanned():
    source = Numbers(6)
    dataset = RowsDataset("odd", RowsOptions(check_rows="when-read"), Odd(), [source], None)
    assert (dataset.size("train"), source.scans, dataset.row("train", 5).text) == (6, 0, "5")
    with pytest.raises(DataError, match=r"numbers: row 4: 4 is even$"):
        dataset.row("train", 4)

    # A row is told by its number in its own source.
    first, second = Numbers(5), Numbers(8)
    second.name = "others"
    dataset = RowsDataset("odd", RowsOptions(check_rows="when-read"), Odd(), [first, second], None)
    with pytest.raises(DataError, match=r"others: row 7: it is 7$"):
        dataset.row("train", 12)
