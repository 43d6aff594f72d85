"""The environment `calculator`: the model writes an expression, and is told its value.

A turn whose last line is `calc: 12*(3+4)=` is answered with `84`; any other turn is the model's answer, and the last.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Final

import attrs

from cosmos_core.config import option
from cosmos_core.protocols import Environment, EnvironmentCapabilities, EnvironmentContext, Provider, Turn, hookimpl
from cosmos_core.types import Prompt

LONGEST: Final = 200
"""Characters of an expression."""
_LARGEST_BITS: Final = 512
_DIGITS: Final = 12
_DEPTH: Final = 40
_TOKEN: Final = re.compile(r"\s*(?:(\d+(?:\.\d*)?|\.\d+)|([-+*/()]))", re.ASCII)


class ExpressionError(ValueError):
    """An expression has no value."""


def evaluate(expression: str) -> Fraction:
    """The value of an expression of numbers, `+ - * /` and parentheses, exact, in bounded time and memory.

    sum     := product (("+" | "-") product)*
    product := signed (("*" | "/") signed)*
    signed  := ("+" | "-") signed | "(" sum ")" | number

    Raises:
        ExpressionError: It is malformed, too long or too large, or divides by zero.
    """
    if len(expression) > LONGEST:
        raise ExpressionError(f"an expression of {len(expression)} characters; the longest is {LONGEST}")
    parser = _Parser(_tokens(expression))
    value = parser.sum(0)
    parser.end()
    return value


def shown(value: Fraction) -> str:
    """A whole number as it is, another one with twelve significant digits."""
    return str(value.numerator) if value.denominator == 1 else f"{float(value):.{_DIGITS}g}"


def _tokens(expression: str) -> list[str]:
    found, place, text = [], 0, expression.strip()
    while place < len(text):
        match = _TOKEN.match(text, place)
        if match is None:
            raise ExpressionError(f"{text[place:].lstrip()[:1]!r} is no part of an expression")
        found.append(match[1] or match[2])
        place = match.end()
    return found


class _Parser:
    """Reads tokens from left to right."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens = tokens
        self._place = 0

    def end(self) -> None:
        if self._next():
            raise ExpressionError(f"{self._next()!r} is not expected")

    def sum(self, depth: int) -> Fraction:
        value = self._product(depth)
        while (operator := self._next()) in ("+", "-"):
            self._place += 1
            other = self._product(depth)
            value = _bounded(value + other if operator == "+" else value - other)
        return value

    def _product(self, depth: int) -> Fraction:
        value = self._signed(depth)
        while (operator := self._next()) in ("*", "/"):
            self._place += 1
            other = self._signed(depth)
            if operator == "/" and not other:
                raise ExpressionError("division by zero")
            value = _bounded(value * other if operator == "*" else value / other)
        return value

    def _signed(self, depth: int) -> Fraction:
        if depth > _DEPTH:
            raise ExpressionError(f"it is nested more than {_DEPTH} deep")
        token = self._next()
        self._place += 1
        if token in ("+", "-"):
            value = self._signed(depth + 1)
            return -value if token == "-" else value
        if token == "(":
            value = self.sum(depth + 1)
            if self._next() != ")":
                raise ExpressionError("a parenthesis is not closed")
            self._place += 1
            return value
        if not token or (not token[0].isdigit() and token[0] != "."):
            raise ExpressionError(f"{token!r} stands where a number is expected" if token else "it ends too early")
        return _bounded(Fraction(token))

    def _next(self) -> str:
        return self._tokens[self._place] if self._place < len(self._tokens) else ""


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > _LARGEST_BITS:
        raise ExpressionError("a number is too large")
    return value


@attrs.frozen(kw_only=True)
class CalculatorOptions:
    """Options of the calculator."""

    prefix: str = option(
        "calc:", help="What a line that asks for a value begins with.", validator=attrs.validators.min_len(1)
    )


class Calculator:
    """Answers expressions. Its own reward counts those that it could answer."""

    def __init__(self, options: CalculatorOptions, context: EnvironmentContext) -> None:  # noqa: ARG002 - all are given one
        self._prefix = options.prefix

    async def reset(self, prompt: Prompt, seed: int) -> str | None:  # noqa: ARG002 - the prompt says it all
        """The prompt says it all."""
        return None

    async def step(self, text: str) -> Turn:
        """The value of the expression in the last line; a turn without one ends the dialogue."""
        lines = text.rstrip().splitlines()
        asked = lines[-1].strip() if lines else ""
        if not asked.startswith(self._prefix):
            return Turn(done=True)
        expression = asked.removeprefix(self._prefix).strip().removesuffix("=")
        try:
            value = shown(evaluate(expression))
        except ExpressionError as error:
            return Turn(observation=f"error: {error}\n", role="tool", detail=f"{expression:.40} is wrong")
        return Turn(observation=f"{value}\n", role="tool", reward=1.0, detail=f"{expression:.40}={value:.40}")

    async def close(self) -> None:
        """There is nothing to let go of."""


@hookimpl
def cosmos_environment() -> Provider[Environment]:
    """The provider hook."""
    capabilities = EnvironmentCapabilities(rewards=True, deterministic=True)
    return Provider(create=Calculator, options=CalculatorOptions, capabilities=capabilities)
