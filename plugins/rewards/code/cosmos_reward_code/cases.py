"""The test cases of a program: the row's reference, as test cases."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from typing import Final, TypeAlias

import attrs

from cosmos_core.errors import DataError
from cosmos_core.types import JSON

_DEFINITIONS: Final = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


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
        DataError: It is anything else, or code that asserts nothing when it is run.
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
        # As it will be: after a program, where no `from __future__` may stand.
        compile(f"pass\n{source}", "reference", "exec", dont_inherit=True)
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise DataError(
            f"reward code: the reference {source!r:.200} is no Python code to run after a program ({error})"
        ) from None
    is_asserting = any(isinstance(node, ast.Assert) for node in ast.walk(tree))
    if not is_asserting or not any(isinstance(node, ast.Assert | ast.Call) for node in _run(tree)):
        raise DataError(
            f"reward code: the reference {source!r:.200} asserts nothing when it is run, so that any program would "
            "pass; give it an assert, or a call of the function that has one"
        )
    return Asserts(source=source)


def _run(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a module that are run when it is: none of what is defined for a call, or for the main module."""
    left = [tree]
    while left:
        node = left.pop()
        yield node
        if not isinstance(node, _DEFINITIONS) and not _is_for_main(node):
            left += ast.iter_child_nodes(node)


def _is_for_main(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and any(
        isinstance(each, ast.Name) and each.id == "__name__" for each in ast.walk(node.test)
    )
