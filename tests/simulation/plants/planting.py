"""A bug that is planted in the program for a while, in the source of its functions.

Each is an edit of real code; one that no longer fits is an error, so that none is forgotten. Whoever has imported the
function by name gets the edited one, too.
"""

from __future__ import annotations
import __future__

import contextlib
import functools
import importlib
import inspect
import sys
import textwrap
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import attrs


@attrs.frozen
class Edit:
    """Of a function, method or property: `module:name` or `module:class.name`."""

    function: str
    before: str
    after: str


@attrs.frozen
class Plant:
    """A bug."""

    name: str
    edits: tuple[Edit, ...]


def plant(name: str, *edits: tuple[str, str, str]) -> Plant:
    """A bug, by its edits."""
    return Plant(name, tuple(Edit(*edit) for edit in edits))


@contextlib.contextmanager
def planted(bug: Plant) -> Iterator[None]:
    """Have a bug in the program for a while."""
    with contextlib.ExitStack() as stack:
        for function in dict.fromkeys(edit.function for edit in bug.edits):
            source = source_of(function)
            for edit in bug.edits:
                if edit.function == function:
                    assert source.count(edit.before) == 1, f"{function} has not one {edit.before!r}; plant it elsewhere"
                    source = source.replace(edit.before, edit.after)
            stack.enter_context(replaced(function, source))
        yield


def source_of(function: str) -> str:
    """The source of a function, with its decorators."""
    _, owner, name = _found(function)
    return textwrap.dedent(inspect.getsource(_plain(vars(owner)[name])))


@contextlib.contextmanager
def replaced(function: str, source: str) -> Iterator[None]:
    """Have another function in the place of one, wherever it is known."""
    module, owner, name = _found(function)
    original = vars(owner)[name]
    made: dict[str, Any] = {}
    exec(compile(source, function, "exec", __future__.annotations.compiler_flag), vars(module), made)
    if isinstance(made[name], functools.cached_property):
        made[name].__set_name__(owner, name)
    owners = [owner]
    if isinstance(owner, ModuleType):
        loaded = [each for path, each in sys.modules.items() if path.startswith("cosmos_core.")]
        owners = [each for each in loaded if vars(each).get(name) is original]
    for each in owners:
        setattr(each, name, made[name])
    try:
        yield
    finally:
        for each in owners:
            setattr(each, name, original)


def _found(function: str) -> tuple[ModuleType, Any, str]:
    path, _, name = function.partition(":")
    module = importlib.import_module(path)
    owner_name, _, function_name = name.rpartition(".")
    return module, getattr(module, owner_name) if owner_name else module, function_name


def _plain(found: Any) -> Any:
    """The function behind a property or a class method."""
    return getattr(found, "fget", None) or getattr(found, "__func__", None) or getattr(found, "func", None) or found
