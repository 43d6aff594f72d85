"""Writes a function of a script or a notebook into a file of its own, which a run's processes can read.

They never import the script itself: it would start the run again.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import symtable
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from cosmos_core.errors import ConfigError

_MAIN: Final = "__main__"


def reference(target: str | Callable[..., Any], folder: Path) -> str:
    """The name of a plugin in a recipe, of a function or a class: `PATH.py:NAME`; text stays as it is.

    What a script or a notebook defines is written into `folder`, with what it needs of its imports, constants,
    functions and classes; of another module, the module's own file is meant.

    Raises:
        ConfigError: It is defined inside of a function, or needs something that cannot be written down.
    """
    if isinstance(target, str):
        return target
    name, is_main = getattr(target, "__qualname__", ""), getattr(target, "__module__", None) == _MAIN
    file = None
    with contextlib.suppress(TypeError):  # such as `len`, which no file defines
        file = None if is_main else Path(inspect.getfile(target)).absolute()
    if not name.isidentifier() or not (is_main or (file and file.is_file())):
        raise ConfigError(
            f"{target!r}: it is not a function or class that stands at the top of a file or a cell, so that a run's "
            "processes could not find it; define it there, by name"
        )
    if not is_main:
        return f"{file}:{name}"
    parts = _Parts(sys.modules[_MAIN], name)
    parts.add(name, target)
    path = folder / f"{name}.py"
    path.write_text("\n".join([*parts.imports, *parts.constants, "", *parts.definitions]), encoding="utf-8")
    return f"{path.absolute()}:{name}"


class _Parts:
    """The lines of such a file: imports, constants, and definitions, each after what it needs."""

    def __init__(self, module: ModuleType, wanted: str) -> None:
        # A notebook's or script's `from __future__ import annotations` is no object; annotations are read the same.
        self.imports: Final = [f'"""Written from a script or a notebook, for {wanted}."""', ""]
        self.constants: Final[list[str]] = []
        self.definitions: Final[list[str]] = []
        self._known = vars(module)
        self._wanted: Final = wanted
        self._seen: Final[set[str]] = set()

    def add(self, name: str, value: Any) -> None:
        """Add what a name stands for, once."""
        if name in self._seen:
            return
        self._seen.add(name)
        home = getattr(value, "__module__", None)
        if isinstance(value, ModuleType):
            self.imports.append(f"import {value.__name__} as {name}")
        elif inspect.isfunction(value) or inspect.isclass(value) or (home == _MAIN and hasattr(value, "__wrapped__")):
            if home == _MAIN:
                self._define(value)
            else:
                self.imports.append(f"from {home} import {value.__qualname__} as {name}")
        elif _is_plain(value):
            self.constants.append(f"{name} = {value!r}")
        elif home != _MAIN and home in sys.modules and getattr(sys.modules[home], name, None) is value:
            self.imports.append(f"from {home} import {name}")  # such as what `typing` has
        else:
            raise ConfigError(
                f"{self._wanted} uses {name}, {value!r:.60}, which cannot be written to a file for the run's "
                f"processes; make it inside of {self._wanted}, or put both into a .py file: reward='./FILE.py:NAME'"
            )

    def _define(self, value: Callable[..., Any]) -> None:
        try:
            source = textwrap.dedent(inspect.getsource(value))
        except (OSError, TypeError) as error:
            raise ConfigError(
                f"{self._wanted}: the source of {value.__qualname__} is not known ({error}); put it into a .py file"
            ) from None
        for name in _names(symtable.symtable(source, value.__qualname__, "exec")):
            if name in self._known and name != value.__qualname__:
                self.add(name, self._known[name])
        self.definitions.extend(["", source])


def _names(table: symtable.SymbolTable) -> Iterator[str]:
    """The names of its module that a definition uses, or its decorators, defaults and annotations do."""
    is_module = table.get_type() == "module"
    yield from (
        each.get_name()
        for each in table.get_symbols()
        if (each.is_referenced() and not each.is_assigned() if is_module else each.is_global())
    )
    for child in table.get_children():
        yield from _names(child)


def _is_plain(value: Any) -> bool:
    """True if a value is as it is written."""
    try:
        return bool(ast.literal_eval(repr(value)) == value)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return False
