import contextlib
import re
import time
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosmos_environment_calculator.plugin import ExpressionError, evaluate, shown

NUMBERS = st.integers(0, 999).map(str) | st.decimals(0, 99, places=2).map(str)
EXPRESSIONS = st.recursive(
    NUMBERS,
    lambda inner: st.builds("({} {} {})".format, inner, st.sampled_from("+-*/"), inner) | inner.map("-{}".format),
    max_leaves=6,
)


@given(EXPRESSIONS)
def test_values_are_those_of_exact_arithmetic(expression):
    import re

    exact = re.sub(r"\d+(?:\.\d+)?", lambda match: f"Fraction('{match[0]}')", expression)
    try:
        expected = eval(exact, {"Fraction": Fraction})
    except ZeroDivisionError:
        with pytest.raises(ExpressionError, match="division by zero"):
            evaluate(expression)
        return
    if len(expression) <= 200:
        assert evaluate(expression) == expected


def test_values_are_shown_as_people_write_them():
    for expression, value in [
        ("12*(3+4)", "84"),
        ("2+3*4-5", "9"),
        ("8/2/2", "2"),
        ("2-3-4", "-5"),
        ("1/3", "0.333333333333"),
        ("0.1+0.2", "0.3"),
        (" - ( - .5 ) ", "0.5"),
        ("1.*3", "3"),
        ("--+7", "7"),
        ("9" * 60, "9" * 60),
    ]:
        assert shown(evaluate(expression)) == value


def test_what_has_no_value_says_why():
    for expression, why in [
        ("", "it ends too early"),
        ("1+", "it ends too early"),
        ("(1", "a parenthesis is not closed"),
        ("1)", "')' is not expected"),
        ("1 2", "'2' is not expected"),
        ("*2", "'*' stands where a number is expected"),
        ("2**9", "'*' stands where a number"),
        ("1/0", "division by zero"),
        ("1/(2-2)", "division by zero"),
        ("__import__('os')", "'_' is no part of an expression"),
        ("2^9", "'^' is no part"),
        ("٣+1", "'٣' is no part"),
        ("1e9", "'e' is no part"),
        ("9" * 199, "a number is too large"),
        ("*".join(["999999999999999999999"] * 9), "a number is too large"),
        ("(" * 60 + "1" + ")" * 60, "nested more than 40 deep"),
        ("-" * 150 + "1", "nested more than 40 deep"),
        ("1+" * 150 + "1", "an expression of 301 characters; the longest is 200"),
    ]:
        with pytest.raises(ExpressionError, match=re.escape(why)):
            evaluate(expression)


@given(st.text(alphabet="0123456789.+-*/() ", max_size=200))
def test_nothing_takes_long_or_fails_otherwise(expression):
    began = time.thread_time()
    with contextlib.suppress(ExpressionError):
        evaluate(expression)
    assert time.thread_time() - began < 1.0
