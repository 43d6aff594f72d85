"""What a program is tested against: the row's reference, as test cases."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import TypeAlias

import attrs

from cosmos_core.errors import DataError
from cosmos_core.types import JSON


@attrs.frozen(kw_only=True)
class Dialogue:
    """The program is run with this standard input, and must print this; white space at the ends of lines is ignored."""

    given: str
    expected: str


@attrs.frozen(kw_only=True)
class Asserts:
    """This code is run after the program, in the same module, and must not raise."""

    source: str


Case: TypeAlias = Dialogue | Asserts


def cases_of(reference: JSON) -> tuple[Case, ...]:
    """The test cases of a reference: one or many of `{"stdin": …, "stdout": …}` and of code with asserts.

    Raises:
        DataError: It is anything else, or code without an assert.
    """
    listed = reference if isinstance(reference, list) else [reference]
    if not listed:
        raise DataError("reward code: the reference is an empty list; give at least one test case")
    return tuple(map(_case, listed))


def _case(reference: JSON) -> Case:
    if isinstance(reference, str):
        return _asserts(reference)
    if isinstance(reference, Mapping) and reference.keys() == {"stdin", "stdout"}:
        given, expected = reference["stdin"], reference["stdout"]
        if isinstance(given, str) and isinstance(expected, str):
            return Dialogue(given=given, expected=expected)
    raise DataError(
        f"reward code: the reference {reference!r:.200} is no test case; give code with asserts, or "
        '{"stdin": TEXT, "stdout": TEXT}, or a list of them'
    )


def _asserts(source: str) -> Asserts:
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError) as error:
        raise DataError(f"reward code: the reference {source!r:.200} is no Python code ({error})") from None
    if not any(isinstance(node, ast.Assert) for node in ast.walk(tree)):
        raise DataError(f"reward code: the reference {source!r:.200} asserts nothing, so that any program would pass")
    return Asserts(source=source)
