"""An ordinary program of the OpenAI Agents SDK: an agent that multiplies with a calculator. It knows of no training."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Final

from agents import Agent, function_tool

_OPERATORS: Final[Mapping[type, Callable[[Fraction, Fraction], Fraction]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_LONGEST: Final = 100


def value_of(expression: str) -> Fraction:
    """The value of an expression of numbers and + - * /; raises ValueError if it is none."""
    if len(expression) > _LONGEST:
        raise ValueError(f"it has {len(expression)} characters, and may have {_LONGEST}")
    try:
        return _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, ZeroDivisionError, RecursionError) as error:
        raise ValueError(f"it has no value: {error}") from error


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return Fraction(str(number))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_value(left), _value(right))
    raise ValueError(f"{ast.unparse(node)} is neither a number nor one of + - * /")


@function_tool
def calculate(expression: str) -> str:
    """Compute an expression of numbers and + - * /."""
    try:
        value = value_of(expression)
    except ValueError as error:
        return f"error: {error}"
    return str(value.numerator) if value.denominator == 1 else f"{float(value):.12g}"


calculator = Agent(name="calculator", instructions="Answer with #### and the number.", tools=[calculate])
