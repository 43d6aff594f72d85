"""Tasks: a faulty function, calls with values that the model may see, and others that score it."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

import attrs

from cosmos_core.errors import DataError
from cosmos_core.types import JSON

KEYS = {"source", "examples", "tests"}


@attrs.frozen
class Case:
    """A call, as an expression of Python, and the `repr` of the value that it must have."""

    call: str
    value: str


@attrs.frozen(kw_only=True)
class Task:
    """One task.

    Attributes:
        source: The faulty function, with what it needs.
        examples: What the model may see.
        tests: What scores it; none of their values enters the sandbox.
    """

    source: str
    examples: tuple[Case, ...]
    tests: tuple[Case, ...]


def task_of(reference: JSON) -> Task:
    """The task of a row's reference, `{"source": TEXT, "examples": [[CALL, VALUE], …], "tests": [[CALL, VALUE], …]}`.

    Raises:
        DataError: It is anything else.
    """
    if not isinstance(reference, Mapping) or reference.keys() != KEYS or not isinstance(reference["source"], str):
        raise DataError(
            f"code-agent: the reference {reference!r:.200} is no task; give "
            '{"source": TEXT, "examples": [[CALL, VALUE], ...], "tests": [[CALL, VALUE], ...]}'
        )
    examples, tests = (_cases(reference[name], name) for name in ("examples", "tests"))
    if not tests:
        raise DataError("code-agent: the reference has no tests, so that nothing could be scored; give at least one")
    return Task(source=reference["source"], examples=examples, tests=tests)


def _cases(value: Any, name: str) -> tuple[Case, ...]:
    if not isinstance(value, list):
        raise DataError(f"code-agent: {name} of the reference are {value!r:.200}; give a list of [CALL, VALUE]")
    return tuple(_case(each, name) for each in value)


def _case(value: Any, name: str) -> Case:
    if not isinstance(value, list) or len(value) != 2 or not all(isinstance(each, str) for each in value):
        raise DataError(f"code-agent: {name} of the reference have {value!r:.200}; give [CALL, VALUE], two texts")
    call, expected = value
    try:
        ast.parse(call, mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise DataError(f"code-agent: {name} of the reference call {call!r:.200}, no expression ({error})") from None
    return Case(call, expected)
