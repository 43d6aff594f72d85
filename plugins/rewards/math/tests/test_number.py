"""Reading numbers."""

from decimal import Decimal

from cosmos_reward_math.answer import after_marker, answer_part
from cosmos_reward_math.number import read_number


def test_numbers(subtests):
    for text, value in [
        ("18", "18"),
        ("18.", "18"),
        ("-3", "-3"),
        ("+3", "3"),
        ("$70,000", "70000"),
        ("-$5.50", "-5.5"),
        ("$-5.50.", "-5.5"),
        (".5", "0.5"),
        ("0.10", "0.1"),
        ("1,234,567.89", "1234567.89"),
        ("007", "7"),
    ]:
        with subtests.test(text=text, value=value):
            assert read_number(text) == Decimal(value)


def test_what_is_no_number(subtests):
    for text in [
        "",
        ".",
        "$",
        "-",
        "--1",
        "-$-1",
        "1,23",
        "12,34,567",
        "1.2.3",
        "18 apples",
        "x18",
        "1e3",
        "٣",
        "18..",
        "1 8",
    ]:
        with subtests.test(text=text):
            assert read_number(text) is None


def test_a_decimal_is_exact():
    """As floats these two are equal."""
    assert read_number("0.1") != read_number("0.1000000000000000055511151231257827")


def test_the_last_marker_counts_and_only_its_line():
    assert after_marker("#### 3\nno\n#### 4 \nmore") == "4"
    assert after_marker("####") == ""
    assert after_marker("4") is None
    assert answer_part(" 4\n") == "4"
