"""Bugs that a machine makes: one small change of the controller's state machine each, by rule.

Comparisons are flipped, branches negated, `and` and `or` exchanged, statements removed, numbers raised by one. Left out
is what changes nothing but speed or what people read (`status_details`), refusals, and `invariants`, which is an oracle
itself.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import itertools
import random
from collections.abc import Iterable, Iterator
from types import ModuleType

import attrs

from cosmos_core.control.machine import (
    batch_assembly,
    changes,
    core,
    directives,
    dispatch,
    evaluation,
    ledger,
    membership,
    progress,
    publication,
    recovery,
    relays,
    settings,
    state,
)

from .plants.planting import replaced, source_of

MODULES = (
    batch_assembly,
    changes,
    core,
    directives,
    dispatch,
    evaluation,
    ledger,
    membership,
    progress,
    publication,
    recovery,
    relays,
    settings,
    state,
)
_FLIPPED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
_REMOVED = ast.Expr | ast.AugAssign | ast.Delete | ast.Assign
_CHANGED = ast.Compare | ast.BoolOp | ast.If | ast.IfExp | ast.Constant | _REMOVED
_FOR_PEOPLE = ("status_details", ".rejections", "tell_")
_KEPT = ("refusal", "raise ", "assert ", "fail(", "spare.remove(", "spare.discard(")
"""Statements that stay as they are: without the last ones more is looked at than need be, and nothing else changes."""
_UNREAD = ("settings_of", "_stages", "_dynamic", "_fixed", "_validate", "best_checkpoint", "refusal", "missing")
"""Functions that make settings of a recipe, or words for people."""


@attrs.frozen
class Mutant:
    """A change of a function.

    Attributes:
        function: `module:name` or `module:class.name`.
        line: Of the function, from 1.
        change: In words.
        source: The changed function's.
    """

    function: str
    line: int
    change: str
    source: str

    @property
    def name(self) -> str:
        """Where it is and what it is."""
        return f"{self.function.removeprefix('cosmos_core.control.machine.')}:{self.line}: {self.change}"

    def planted(self) -> contextlib.AbstractContextManager[None]:
        """Have it in the program for a while."""
        return replaced(self.function, self.source)


def drawn(number: int, draw: int) -> list[Mutant]:
    """So many of all mutants."""
    return random.Random(draw).sample(_every(), number)


@functools.cache
def _every() -> list[Mutant]:
    return [mutant for module in MODULES for function in _functions(module) for mutant in mutants(function)]


def mutants(function: str) -> Iterator[Mutant]:
    """All of one function."""
    source = source_of(function)
    nodes = list(ast.walk(ast.parse(source)))
    told = {inner for node in nodes if isinstance(node, ast.stmt) and _is_for_people(node) for inner in ast.walk(node)}
    for index, node in enumerate(nodes):
        if not isinstance(node, _CHANGED) or node in told:
            continue
        tree = ast.parse(source)
        same = next(itertools.islice(ast.walk(tree), index, None))
        if change := _mutate(tree, same):
            yield Mutant(function, node.lineno, change, ast.unparse(ast.fix_missing_locations(tree)))


def _functions(module: ModuleType) -> Iterator[str]:
    for name, found in vars(module).items():
        if inspect.isfunction(found) and found.__module__ == module.__name__ and name not in _UNREAD:
            yield f"{module.__name__}:{name}"
        if inspect.isclass(found) and found.__module__ == module.__name__:
            body = ast.parse(inspect.getsource(found)).body[0]
            assert isinstance(body, ast.ClassDef)
            for method in body.body:
                if isinstance(method, ast.FunctionDef) and method.name not in ("__init__", *_UNREAD):
                    yield f"{module.__name__}:{name}.{method.name}"


def _mutate(tree: ast.Module, node: ast.AST) -> str:
    """Change a node in its tree; what was changed, empty if nothing."""
    before = ast.unparse(node) if isinstance(node, ast.expr | ast.stmt) else ""
    match node:
        case ast.Compare(ops=[op]):
            node.ops = [_FLIPPED[type(op)]()]
        case ast.BoolOp(op=op):
            node.op = ast.Or() if isinstance(op, ast.And) else ast.And()
        case ast.If(test=test) | ast.IfExp(test=test) if not _has(node, _KEPT):
            node.test = ast.UnaryOp(ast.Not(), test)
            return f"negated: if {ast.unparse(test)}"
        case ast.Constant(value=bool(value)):
            node.value = not value
        case ast.Constant(value=int(value)):
            node.value = value + 1
        case ast.Expr() | ast.AugAssign() | ast.Delete() | ast.Assign() if _is_removable(node):
            _remove(tree, node)
            return f"removed: {before}"
        case _:
            return ""
    return f"{before} → {ast.unparse(node)}"


def _is_removable(node: ast.stmt) -> bool:
    """Whether the program would still be one; a docstring is no statement."""
    if isinstance(node, ast.Expr) and not isinstance(node.value, ast.Call):
        return False
    if _has(node, _KEPT):
        return False
    return not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Name | ast.Tuple)


def _is_for_people(node: ast.stmt) -> bool:
    """Whether a statement, or all that it decides, is read by people alone."""
    match node:
        case ast.If(body=body, orelse=[]) | ast.For(body=body, orelse=[]):
            return all(map(_is_for_people, body))
        case ast.Assign(targets=[written]) | ast.AugAssign(target=written) | ast.Expr(value=written):
            return _has(written, _FOR_PEOPLE)
        case _:
            return False


def _has(node: ast.AST, words: Iterable[str]) -> bool:
    """Whether the first line of a node has one of some words in it."""
    head = ast.unparse(node).partition("\n")[0]
    return any(word in head for word in words)


def _remove(tree: ast.Module, node: ast.stmt) -> None:
    for parent in ast.walk(tree):
        for field in ("body", "orelse"):
            block = getattr(parent, field, None)
            if isinstance(block, list) and node in block:
                block[block.index(node)] = ast.Pass()
