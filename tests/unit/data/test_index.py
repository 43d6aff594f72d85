"""Counts of rows that are left out."""

from cosmos_core.data.dataset import Omissions
from cosmos_core.protocols.dataset import Omission


def test_reasons_are_counted_the_most_frequent_first():
    # The most frequent reason comes first with its first row.
    omissions = Omissions()
    for reason, place in (("a", "1"), ("b", "2"), ("b", "3"), ("c", "4")):
        omissions.add(reason, place)
    assert omissions.total == 4
    assert omissions.told() == (
        Omission(reason="b", num_rows=2, first="2"),
        Omission(reason="a", num_rows=1, first="1"),
        Omission(reason="c", num_rows=1, first="4"),
    )

    # Reasons without number are counted together.
    omissions = Omissions()
    for number in range(1000):
        omissions.add(f"reason {number}", str(number))
    told = omissions.told()
    assert (len(told), omissions.total) == (51, 1000)
    assert told[0] == Omission(reason="other reasons", num_rows=950, first="50")
